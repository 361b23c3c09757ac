# The options of the build, and what every target is compiled with.
option(HOLDFAST_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(HOLDFAST_PYTHON "Build the Python package's extension module (pip does)" OFF)
option(HOLDFAST_FUZZ "Build the fuzzers (clang only)" OFF)
set(HOLDFAST_SANITIZE "" CACHE STRING "Sanitizers, as -fsanitize= takes them: address,undefined or thread")
# For this project's own builds: the presets turn it on. Off by default, because the next compiler warns of more.
option(HOLDFAST_WERROR "Warnings are errors" OFF)

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()
# Checks of this project never hang on NDEBUG; only the libraries' do.

if(NOT CMAKE_CXX_COMPILER_LAUNCHER AND PROJECT_IS_TOP_LEVEL)
  find_program(HOLDFAST_CCACHE ccache)
  mark_as_advanced(HOLDFAST_CCACHE)
  if(HOLDFAST_CCACHE)
    set(CMAKE_C_COMPILER_LAUNCHER ${HOLDFAST_CCACHE})
    set(CMAKE_CXX_COMPILER_LAUNCHER ${HOLDFAST_CCACHE})
  endif()
endif()

add_library(holdfast_flags INTERFACE)
target_compile_options(holdfast_flags INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion
                       -Wno-missing-field-initializers)
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  target_compile_options(holdfast_flags INTERFACE -Wthread-safety -Werror=thread-safety)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # Wrong in GCC 12 about std::string and std::optional once they are inlined (its bugs 105651 and 80635); what they are
  # for, clang and the sanitizers find.
  target_compile_options(holdfast_flags INTERFACE -Wno-restrict -Wno-maybe-uninitialized)
  # Garbage of the compiler is collected less often: a tenth of its time for 50 MiB more memory.
  target_compile_options(holdfast_flags INTERFACE --param=ggc-min-expand=300 --param=ggc-min-heapsize=1000000)
endif()
if(HOLDFAST_WERROR)
  target_compile_options(holdfast_flags INTERFACE -Werror)
endif()
if(HOLDFAST_SANITIZE)
  target_compile_options(holdfast_flags INTERFACE -fsanitize=${HOLDFAST_SANITIZE} -fno-omit-frame-pointer
                         -fno-sanitize-recover=all)
  target_link_options(holdfast_flags INTERFACE -fsanitize=${HOLDFAST_SANITIZE})
endif()
if(HOLDFAST_FUZZ)
  # Coverage for libFuzzer in the library, too; its main comes with fuzz/'s own link option.
  target_compile_options(holdfast_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()

# Of what is not to be fast itself: programs call the library, and the planted bugs are for tests. Optimizing command lines
# and JSON takes half of the time in which programs compile.
set(holdfast_light_options $<$<CONFIG:Release>:-O1>)
