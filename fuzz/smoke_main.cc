// Runs a target without libFuzzer: each file of its corpus, then seeded changes of the files, and
// random bytes.
//
//   NAME_smoke [--must-fail] ROUNDS CORPUS
//
// --must-fail: exit status 0 only if an expectation of the target fails, as its planted bug must
// make it. HOLDFAST_SEED in the environment replaces the seed.
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fuzz/mutate.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes);

namespace {

constexpr size_t kRandomBytesMax = 600;

void Try(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

std::vector<std::string> ReadCorpus(const char* directory) {
  std::vector<std::string> corpus;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    std::ifstream file(entry.path(), std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return corpus;
}

int Run(long rounds, const char* directory) {
  const std::vector<std::string> corpus = ReadCorpus(directory);
  if (corpus.empty()) {
    std::fprintf(stderr, "%s: no inputs\n", directory);
    return 1;
  }
  for (const std::string& input : corpus) Try(input);
  const char* const given = std::getenv("HOLDFAST_SEED");
  const uint32_t seed =
      given != nullptr ? static_cast<uint32_t>(std::strtoul(given, nullptr, 10)) : 1;
  std::printf("%zu inputs, %ld rounds, HOLDFAST_SEED=%u\n", corpus.size(), rounds, seed);
  std::fflush(stdout);
  holdfast::fuzz::Mutator mutator(seed);
  for (long round = 0; round < rounds; ++round) {
    if (round % 4 == 0) {
      Try(mutator.Bytes(mutator.Below(kRandomBytesMax)));
    } else {
      Try(mutator.Change(corpus[mutator.Below(corpus.size())]));
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const bool must_fail = argc > 1 && std::strcmp(argv[1], "--must-fail") == 0;
  if (argc != (must_fail ? 4 : 3)) {
    std::fprintf(stderr, "usage: %s [--must-fail] ROUNDS CORPUS\n", argv[0]);
    return 64;
  }
  const long rounds = std::strtol(argv[argc - 2], nullptr, 10);
  if (!must_fail) return Run(rounds, argv[argc - 1]);
  const pid_t child = fork();
  if (child == 0) _exit(Run(rounds, argv[argc - 1]));
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return 1;
  // A failed expectation ends the child by a signal, or through a sanitizer.
  const bool failed = WIFSIGNALED(status) || (WIFEXITED(status) && WEXITSTATUS(status) > 1);
  if (!failed) std::fprintf(stderr, "the planted bug was not found\n");
  return failed ? 0 : 1;
}
