// The output of holdfast-doctor: a table for people, one JSON document for machines.
#ifndef HOLDFAST_TOOLS_DOCTOR_OUTPUT_H_
#define HOLDFAST_TOOLS_DOCTOR_OUTPUT_H_

#include <string>
#include <vector>

#include "holdfast/probe.h"

namespace holdfast::tools {

/// Returns the obstacles to saves with the default launcher; empty without an obstacle.
std::vector<std::string> Refusals(const ProbeReport& report);

/// Returns the table, and the advice.
std::string DoctorText(const ProbeReport& report);

/// Returns the JSON document; --help lists the keys.
std::string DoctorJson(const ProbeReport& report, int exit_status);

/// Return the same documents for a directory that could not be probed.
std::string DoctorFailedText(const std::string& error);
std::string DoctorFailedJson(const std::string& directory, const std::string& error,
                             int exit_status);

}  // namespace holdfast::tools

#endif  // HOLDFAST_TOOLS_DOCTOR_OUTPUT_H_
