// The calls of one save, in the order of the model of the protocol (tests/model). Written by
// `cd tests && python3 -m model.order`: not by hand.
#ifndef HOLDFAST_TESTS_UNIT_WORKER_MODEL_ORDER_H_
#define HOLDFAST_TESTS_UNIT_WORKER_MODEL_ORDER_H_

namespace holdfast::worker::model {

// One call in each line. MANIFEST, RECORD and HIDDEN stand for names of the save.
inline constexpr char kOneRank[] = R"(
fsync partial
fsync parent
write a.bin.tmp
truncate a.bin.tmp
fsync a.bin.tmp
rename a.bin.tmp a.bin
fsync partial
fsync MANIFEST.tmp
rename MANIFEST.tmp MANIFEST
fsync partial
fsync RECORD.tmp
rename RECORD.tmp RECORD
fsync partial
rename partial step-7
fsync parent
)";

inline constexpr char kReplacing[] = R"(
rename partial step-7
rename partial step-7
rename partial HIDDEN
fsync parent
)";

inline constexpr char kRankZeroOfTwo[] = R"(
fsync partial
fsync RECORD.tmp
rename RECORD.tmp RECORD
fsync partial
rename partial step-7
fsync parent
)";

inline constexpr char kVoteTakenBack[] = R"(
fsync RECORD.tmp
rename RECORD.tmp RECORD
fsync partial
rename RECORD RECORD.tmp
remove MANIFEST
fsync partial
remove a.bin
)";

inline constexpr char kRankOneOfTwo[] = R"(
fsync partial
fsync parent
)";

inline constexpr char kGivingUp[] = R"(
fsync partial
rename partial step-7
rename RECORD RECORD.tmp
remove MANIFEST
fsync partial
remove a.bin
fsync partial
remove RECORD.tmp
remove partial
)";

}  // namespace holdfast::worker::model

#endif  // HOLDFAST_TESTS_UNIT_WORKER_MODEL_ORDER_H_
