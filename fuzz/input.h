// An input as a sequence of choices. Behind its end each choice is 0.
#ifndef HOLDFAST_FUZZ_INPUT_H_
#define HOLDFAST_FUZZ_INPUT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace holdfast::fuzz {

class Input {
 public:
  Input(const uint8_t* data, size_t bytes) : data_(data), left_(bytes) {}

  bool AtEnd() const { return left_ == 0; }
  size_t left() const { return left_; }

  uint8_t Byte() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }
  /// Two bytes, little-endian.
  uint32_t Short() {
    const uint32_t low = Byte();
    return low | uint32_t{Byte()} << 8;
  }
  /// A number below `bound`, which is at most 65536.
  size_t Below(size_t bound) { return bound <= 1 ? 0 : (bound <= 256 ? Byte() : Short()) % bound; }

  /// Copies the next bytes, at most `bytes`. Returns their number.
  size_t Take(void* out, size_t bytes) {
    const size_t taken = std::min(bytes, left_);
    if (taken != 0) std::memcpy(out, data_, taken);
    data_ += taken;
    left_ -= taken;
    return taken;
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

}  // namespace holdfast::fuzz

#endif  // HOLDFAST_FUZZ_INPUT_H_
