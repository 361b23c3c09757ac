// What holdfast-doctor prints: a table for people, one JSON document for machines.
#ifndef HOLDFAST_TOOLS_DOCTOR_OUTPUT_H_
#define HOLDFAST_TOOLS_DOCTOR_OUTPUT_H_

#include <string>
#include <vector>

#include "holdfast/probe.h"

namespace holdfast::tools {

/// What keeps saves from working here with the default launcher; empty if nothing does.
std::vector<std::string> Refusals(const ProbeReport& report);

/// The table, and what to change.
std::string DoctorText(const ProbeReport& report);

/// The JSON document; its keys are listed in --help.
std::string DoctorJson(const ProbeReport& report, int exit_status);

/// The same documents for a directory that could not be probed at all.
std::string DoctorFailedText(const std::string& error);
std::string DoctorFailedJson(const std::string& directory, const std::string& error,
                             int exit_status);

}  // namespace holdfast::tools

#endif  // HOLDFAST_TOOLS_DOCTOR_OUTPUT_H_
