// What verify-checkpoint prints: lines for people, one JSON document for machines.
#ifndef HOLDFAST_TOOLS_VERIFY_OUTPUT_H_
#define HOLDFAST_TOOLS_VERIFY_OUTPUT_H_

#include <string>
#include <vector>

#include "holdfast/verify.h"

namespace holdfast::tools {

/// "sound", "corrupt", "incomplete", "unreadable".
const char* Word(Verdict verdict);

/// The worse of two: corrupt, then unreadable, then incomplete, then sound.
Verdict Worse(Verdict a, Verdict b);

/// One line per fault, and with more faults than were kept, how many are not shown.
std::string FaultLines(const VerifyReport& report);

/// The line that says how a path was found, followed by the note, if there is one.
std::string ReportLines(const VerifyReport& report);

/// The line for several paths together.
std::string SummaryLine(const std::vector<VerifyReport>& reports);

/// The JSON document; its keys are listed in --help.
std::string Json(const std::vector<VerifyReport>& reports, int exit_status);

}  // namespace holdfast::tools

#endif  // HOLDFAST_TOOLS_VERIFY_OUTPUT_H_
