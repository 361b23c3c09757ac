// One task of a trainer: what a process of a job saves, and what happens to it meanwhile.
#ifndef HOLDFAST_TOOLS_TRAINER_TASK_H_
#define HOLDFAST_TOOLS_TRAINER_TASK_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "holdfast/checkpointer.h"
#include "holdfast/pod.h"
#include "tools/trainer/state.h"

namespace holdfast::trainer {

/// An event of `schedule.py`.
struct Event {
  std::string kind;   ///< "kill-worker", "cancel", "limit-size", ...
  std::string phase;  ///< "writing", "commit" or "later".
  double share = 0;   ///< Of the bytes that are written when it happens.
  double seconds = 0;
  double place = 0;        ///< Of a change in flight: share of the sealed extents before it.
  uint64_t bytes = 0;      ///< Of a limit.
  bool in_flight = false;  ///< A limit or a change: at the phase, and not at the call or the seal.
};

/// A data file of a save whose processes have died.
struct DeadFile {
  uint64_t number = 0;  ///< Of the save.
  uint32_t files = 1;   ///< Of the save's plan.
  AttemptId attempt;
  std::string name;  ///< In the plan.
  std::string path;
};

struct Action {
  std::string what;  ///< "save", "wait", "load", "move" or "recover".
  // Of a save:
  uint64_t number = 0;
  uint64_t step = 0;
  std::string name;  ///< Of the checkpoint.
  AttemptId attempt;
  uint64_t rate = 0;
  uint32_t files = 1;
  bool mutate = false;
  std::optional<Event> event;
  // Of a load:
  uint64_t back = 0;  ///< How many checkpoints before the last of the list.
  // Of a move:
  bool beside = false;  ///< While saves are written.
};

struct Task {
  uint32_t job = 0;
  std::string log;     ///< File that standard error goes to.
  std::string second;  ///< Directory that the process sees in place of `mount`; or empty.
  std::string mount;
  CheckpointerOptions options;  ///< `directory` may not exist yet.
  bool replace = false;
  std::optional<uint64_t> device;  ///< Seed of the stand-in that holds the tensors; none: the host.
  double outcome_seconds_max = 0;  ///< In which every save has ended.
  double settle_seconds_max = 0;   ///< In which staging memory is free after the last save.
  double hung_seconds = 0;         ///< For which a hanging worker is stopped.
  std::string pool;                ///< File of the words that tensors are made of.
  std::vector<Action> actions;
  std::vector<DeadFile> dead;  ///< To look at. The task then has no actions.
  bool spoil = false;          ///< Writes foreign bytes into dead files: a test of the look.
  std::map<uint64_t, std::vector<Recipe>> states;  ///< By number of the save.
};

/// Parses one line of the driver. Throws nlohmann::json's exceptions: the driver is of one version
/// with this program.
Task ParseTask(const std::string& line);

}  // namespace holdfast::trainer

#endif  // HOLDFAST_TOOLS_TRAINER_TASK_H_
