#include "tools/trainer/task.h"

#include <nlohmann/json.hpp>

#include "tools/words.h"

namespace holdfast::trainer {
namespace {

using nlohmann::json;

CheckpointerOptions ParseOptions(const json& given) {
  CheckpointerOptions options;
  options.directory = given.at("directory");
  options.staging.arena_bytes = given.at("arena_bytes");
  options.launcher = tools::LauncherWords().at(given.at("launcher"));
  options.engine = tools::EngineWords().at(given.at("engine"));
  options.read_back = given.at("read_back");
  options.second_look = given.at("second_look");
  options.trainer_death =
      given.at("trainer_death") == "stop" ? TrainerDeath::kStop : TrainerDeath::kFinish;
  const std::string full = given.at("when_full");
  options.when_full = full == "skip"   ? WhenFull::kSkip
                      : full == "fail" ? WhenFull::kFail
                                       : WhenFull::kWait;
  options.retention.keep_last = given.at("keep_last");
  options.time_liveness_max = absl::Seconds(given.at("time_liveness_max").get<double>());
  options.time_memory_max = absl::Seconds(given.at("time_memory_max").get<double>());
  options.time_stalled_max = absl::Seconds(given.at("time_stalled_max").get<double>());
  options.time_ranks_max = absl::Seconds(given.at("time_ranks_max").get<double>());
  options.worker_program = given.at("worker_program");
  options.rank = given.at("rank");
  options.world_size = given.at("world_size");
  return options;
}

Event ParseEvent(const json& given) {
  return {.kind = given.at("kind"),
          .phase = given.at("phase"),
          .share = given.at("share"),
          .seconds = given.at("seconds"),
          .place = given.value("place", 0.0),
          .bytes = given.value("bytes", uint64_t{0}),
          .in_flight = given.value("in_flight", false)};
}

AttemptId ParseAttempt(const json& given) { return {.high = given.at(0), .low = given.at(1)}; }

Action ParseAction(const json& given) {
  Action action;
  action.what = given.at("do");
  action.back = given.value("back", uint64_t{0});
  action.beside = given.value("beside", false);
  if (action.what != "save") return action;
  action.number = given.at("n");
  action.step = given.at("step");
  action.name = given.at("name");
  action.attempt = ParseAttempt(given.at("attempt"));
  action.rate = given.at("rate");
  action.files = given.at("files");
  action.mutate = given.at("mutate");
  if (given.contains("event")) action.event = ParseEvent(given.at("event"));
  return action;
}

Recipe ParseRecipe(const json& given) {
  return {.name = given.at(0),
          .dtype = given.at(1),
          .shape = given.at(2),
          .bytes = given.at(3),
          .at = given.at(4),
          .key = given.at(5)};
}

}  // namespace

Task ParseTask(const std::string& line) {
  const json given = json::parse(line);
  Task task;
  task.job = given.at("job");
  task.log = given.at("log");
  task.second = given.at("second");
  task.mount = given.at("mount");
  task.options = ParseOptions(given.at("options"));
  task.replace = given.at("replace");
  if (const json& seed = given.at("device"); !seed.is_null()) task.device = seed;
  task.outcome_seconds_max = given.at("outcome_seconds_max");
  task.settle_seconds_max = given.at("settle_seconds_max");
  task.hung_seconds = given.at("hung_seconds");
  task.pool = given.at("pool");
  task.spoil = given.at("spoil");
  for (const json& file : given.at("dead")) {
    task.dead.push_back({.number = file.at("n"),
                         .files = file.at("files"),
                         .attempt = ParseAttempt(file.at("attempt")),
                         .name = file.at("name"),
                         .path = file.at("path")});
  }
  for (const json& action : given.at("actions")) task.actions.push_back(ParseAction(action));
  for (const auto& [number, recipes] : given.at("states").items()) {
    std::vector<Recipe>& state = task.states[std::stoull(number)];
    for (const json& recipe : recipes) state.push_back(ParseRecipe(recipe));
  }
  return task;
}

}  // namespace holdfast::trainer
