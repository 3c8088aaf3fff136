// The smallest test harness: a failed check names itself and makes the program fail.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>

namespace freetoken::host::test {

template <class Left, class Right>
void check_equal(const Left& left, const Right& right, const char* text, const char* file,
                 int line) {
  if (left == right) return;
  std::ostringstream out;
  out << file << ':' << line << ": " << text << ": " << left << " is not " << right << '\n';
  std::fputs(out.str().c_str(), stderr);
  std::_Exit(1);
}

}  // namespace freetoken::host::test

#define CHECK(condition)                                                                       \
  freetoken::host::test::check_equal(static_cast<bool>(condition), true, #condition, __FILE__, \
                                     __LINE__)
#define CHECK_EQUAL(left, right) \
  freetoken::host::test::check_equal((left), (right), #left " == " #right, __FILE__, __LINE__)
