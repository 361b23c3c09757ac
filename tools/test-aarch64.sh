#!/usr/bin/env bash
# Builds the C++ tests for aarch64 with the compiler and libraries of the wheels, and runs them under user-mode emulation.
#
#   tools/test-aarch64.sh [--labels LABEL,...] [--pages BYTES,...] [--jobs N] [--only REGEX] [--write]
#
# --labels  which tests (default contract; tests/README.md names the others).
# --pages   bytes of a page that the emulated processor has (default 4096,65536): all tests run once for each.
# --jobs    compilers and tests to run at once (default: by processors and memory).
# --only    programs of tests whose names match (default: all of the labels).
# --write   writes the counts into docs/install.md; only for all tests of the labels.
#
# At the end programs of aarch64 make a save with a worker process for each size of a page, and verify-checkpoint of aarch64 and
# of x86-64 verify it. The emulator and the C library are Debian's packages, unpacked into build/wheels. An emulator has no
# io_uring: files are written by pwrite. What the machine must have is what tools/build-wheels.sh asks for; root is not needed.
# Exit status 0 if no test failed and every save is sound.
set -euo pipefail
# shellcheck source=tools/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
# shellcheck source=tools/wheels/compiler.sh
source "$root/tools/wheels/compiler.sh"
clean_environment "$@"

labels=contract pages=4096,65536 jobs=$(build_jobs) only=. write=
read_options 'labels= pages= jobs= only= write' "$@"
IFS=, read -ra pages <<<"$pages"
[ "$only" = . ] || [ -z "$write" ] || fail "--write is for all tests of the labels: leave --only out"
need_programs apt-get dpkg-source dpkg-deb make pkg-config
build_tools python3
use_nasm

# configure ARCH OPTION...: this tree for ARCH, in build/wheels/ARCH/tests.
configure() {
  local arch=$1 prefix=$wheels/$1/prefix
  shift
  env PKG_CONFIG_LIBDIR="$prefix/lib/pkgconfig" cmake -G Ninja -S "$root" -B "$wheels/$arch/tests" -Wno-dev \
    -DCMAKE_TOOLCHAIN_FILE="$root/tools/wheels/toolchain.cmake" -DHOLDFAST_WHEEL_ARCH="$arch" \
    -DHOLDFAST_WHEEL_TOOLS="$wheels/$arch/tools" -DCMAKE_PREFIX_PATH="$prefix;$prefix-tests" -DCMAKE_BUILD_TYPE=Release \
    -DHOLDFAST_CCACHE=OFF "$@" >"$wheels/$arch/tests.log" 2>&1 || {
    tail -n 40 "$wheels/$arch/tests.log"
    fail "the tests could not be configured for $arch"
  }
}

build() { cmake --build "$wheels/$1/tests" -j "$jobs" --target "${@:2}"; }

say "== programs for x86_64"
compiler x86_64
"$root/tools/wheels/dependencies.sh" x86_64 "$jobs"
configure x86_64 -DHOLDFAST_TESTS=OFF
build x86_64 verify-checkpoint

say "== tests for aarch64"
unpack libc6-arm64-cross qemu-user-static
emulator=$wheels/qemu-user-static/usr/bin/qemu-aarch64-static
libraries=$wheels/libc6-arm64-cross/usr/aarch64-linux-gnu
compiler aarch64
"$root/tools/wheels/dependencies.sh" aarch64 "$jobs" tests
configure aarch64 -DHOLDFAST_TESTS=ON -DCMAKE_CROSSCOMPILING_EMULATOR="$emulator;-L;$libraries"
tests=$wheels/aarch64/tests
ctest=(ctest --test-dir "$tests" -L "^(${labels//,/|})\$" -R "$only")
mapfile -t targets < <("${ctest[@]}" -N | sed -n 's/^ *Test *#[0-9]*: [a-z]*\/\([a-z0-9_]*_test\)\b.*/\1/p' | sort -u)
[ ${#targets[@]} -gt 0 ] || fail "no test of these labels matches"
build aarch64 "${targets[@]}" holdfast-demo verify-checkpoint

# A file of which the demo trains the tensors.
python3 - "$wheels/aarch64/state.safetensors" <<'END'
import json, struct, sys
count, elements = 6, 1 << 20
tensors = {f"layer.{i}": {"dtype": "F32", "shape": [elements], "data_offsets": [4 * elements * i, 4 * elements * (i + 1)]} for i in range(count)}
head = json.dumps(tensors).encode()
head += b" " * (-len(head) % 8)
with open(sys.argv[1], "wb") as file:
    file.write(struct.pack("<Q", len(head)) + head + struct.pack("<f", 1.5) * elements * count)
END

results=$wheels/aarch64/results
rm -rf "$results" && mkdir -p "$results"
status=0
for page in "${pages[@]}"; do
  say "== tests for aarch64, pages of $page bytes"
  export QEMU_PAGESIZE=$page
  "${ctest[@]}" -j "$jobs" --output-on-failure --test-output-size-passed 4000000 --test-output-size-failed 4000000 \
    --output-junit "$results/$page.xml" || status=1

  say "== a save by aarch64, pages of $page bytes"
  saves=$wheels/aarch64/saves
  for launcher in spawn persistent; do
    rm -rf "$saves"
    HOLDFAST_WORKER=$tests/emulated/holdfast-worker "$tests/emulated/holdfast-demo" "$wheels/aarch64/state.safetensors" --dir "$saves" --saves 2 --launcher "$launcher" || status=1
    for verify in "$tests/emulated/verify-checkpoint" "$wheels/x86_64/tests/tools/verify-checkpoint"; do
      for save in "$saves"/*/; do
        verdict=unsound
        "$verify" "$save" && verdict=sound || status=1
        echo "$page $launcher ${verify#"$wheels/"} $verdict" >>"$results/saves"
      done
    done
  done
  unset QEMU_PAGESIZE
done

say "== summary"
python3 -B "$root/tools/wheels/aarch64_table.py" --labels "$labels" $write "$results" "${pages[@]}" || status=1
exit "$status"
