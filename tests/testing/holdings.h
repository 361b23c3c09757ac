// Resources of a process, by /proc: shows that a save leaves none behind.
#ifndef HOLDFAST_TESTS_TESTING_HOLDINGS_H_
#define HOLDFAST_TESTS_TESTING_HOLDINGS_H_

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace holdfast::testing {

struct Holdings {
  std::map<int, std::string> fds;  ///< Number to open file.
  std::vector<std::string>
      shared_mappings;          ///< Lines of maps; private ones come and go with malloc.
  std::vector<pid_t> children;  ///< Zombies included.
  uint64_t mappings = 0;        ///< Private mappings included.
  uint64_t resident_private_bytes = 0;
  uint64_t resident_shared_bytes = 0;  ///< Shared memory: arenas, job tables.

  static Holdings OfSelf();
  static Holdings Of(pid_t pid);

  /// Returns resources that are not in `before`, one line each.
  std::vector<std::string> Beyond(const Holdings& before) const;
};

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_HOLDINGS_H_
