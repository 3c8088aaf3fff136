#include "check.hpp"
#include "depth_control.hpp"

using freetoken::host::DepthControl;

namespace {

void grows_while_throughput_grows() {
  DepthControl control(4, 64);
  CHECK_EQUAL(control.depth(), 4U);
  CHECK_EQUAL(control.sample(1.0), 8U);
  CHECK_EQUAL(control.sample(1.9), 16U);
  CHECK_EQUAL(control.sample(3.5), 32U);
  CHECK_EQUAL(control.sample(3.6), 16U);  // +3 % is noise: back to where it paid
  CHECK_EQUAL(control.sample(3.5), 16U);
}

void never_leaves_its_bounds() {
  DepthControl control(4, 24);
  double rate = 1.0;
  for (int i = 0; i < 100; ++i) {
    CHECK(control.sample(rate *= 2) <= 24U);
  }
  CHECK_EQUAL(control.depth(), 24U);
  CHECK_EQUAL(DepthControl(9, 3).depth(), 3U);
  CHECK_EQUAL(DepthControl(0, 0).depth(), 1U);
}

void tries_again_when_the_disk_becomes_faster() {
  DepthControl control(4, 64);
  control.sample(1.0);
  CHECK_EQUAL(control.sample(1.0), 4U);
  int samples_count = 0;
  while (control.depth() == 4U) {
    control.sample(1.0);
    CHECK(++samples_count < 100);
  }
  CHECK_EQUAL(control.depth(), 8U);
  CHECK_EQUAL(control.sample(2.0), 16U);  // now it pays
}

void a_disk_that_never_gains_is_left_alone() {
  DepthControl control(4, 64);
  int trials_count = 0;
  for (int i = 0; i < 1000; ++i) {
    if (control.sample(1.0) != 4U) ++trials_count;
  }
  CHECK(trials_count >= 2);
  CHECK(trials_count < 20);
}

}  // namespace

int main() {
  grows_while_throughput_grows();
  never_leaves_its_bounds();
  tries_again_when_the_disk_becomes_faster();
  a_disk_that_never_gains_is_left_alone();
  return 0;
}
