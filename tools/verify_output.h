// The output of verify-checkpoint: lines for people, one JSON document for machines.
#ifndef HOLDFAST_TOOLS_VERIFY_OUTPUT_H_
#define HOLDFAST_TOOLS_VERIFY_OUTPUT_H_

#include <string>
#include <vector>

#include "holdfast/verify.h"

namespace holdfast::tools {

/// Returns one line per fault, and the number of faults beyond the kept ones.
std::string FaultLines(const VerifyReport& report);

/// Returns the verdict line of a path, followed by the note, if any.
std::string ReportLines(const VerifyReport& report);

/// Returns one line per directory that was found and not verified.
std::string UncommittedLines(const std::vector<std::string>& uncommitted);

/// The line for several checkpoints together.
std::string SummaryLine(const std::vector<VerifyReport>& reports);

/// Returns the JSON document; --help lists the keys.
std::string Json(const std::vector<VerifyReport>& reports,
                 const std::vector<std::string>& uncommitted, int exit_status);

}  // namespace holdfast::tools

#endif  // HOLDFAST_TOOLS_VERIFY_OUTPUT_H_
