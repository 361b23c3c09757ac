// One task, from the first save to the last outcome.
#ifndef HOLDFAST_TOOLS_TRAINER_LIFE_H_
#define HOLDFAST_TOOLS_TRAINER_LIFE_H_

#include "tools/trainer/events.h"
#include "tools/trainer/task.h"

namespace holdfast::trainer {

/// Runs a task, and tells what happens.
void Live(const Task& task, Teller* teller);

}  // namespace holdfast::trainer

#endif  // HOLDFAST_TOOLS_TRAINER_LIFE_H_
