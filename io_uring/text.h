// Bounded text for reasons and state dumps: long text is cut, the end is always terminated.
//
// Below the fork line there is no snprintf, which may take the locale's lock.
#ifndef HOLDFAST_IO_URING_TEXT_H_
#define HOLDFAST_IO_URING_TEXT_H_

#include <cstddef>
#include <cstdint>

namespace holdfast::io {

class Text {
 public:
  Text(char* out, size_t bytes) : out_(out), bytes_(bytes) {
    if (bytes_ > 0) out_[0] = '\0';
  }

  Text& Add(const char* text) {
    for (; *text != '\0' && length_ + 1 < bytes_; ++text) out_[length_++] = *text;
    if (bytes_ > 0) out_[length_] = '\0';
    return *this;
  }

  Text& Add(uint64_t number) {
    char digits[21] = {};  // 20 digits of 2^64 - 1 and the end
    char* first = digits + 20;
    do {
      *--first = static_cast<char>('0' + number % 10);
      number /= 10;
    } while (number != 0);
    return Add(first);
  }

  /// Appends the symbolic name of an errno, or its number without a name.
  Text& AddError(int error);

 private:
  char* out_;
  size_t bytes_;
  size_t length_ = 0;
};

}  // namespace holdfast::io

#endif  // HOLDFAST_IO_URING_TEXT_H_
