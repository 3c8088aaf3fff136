// The kernels for amx over emulated instructions, which come first.
// clang-format off
#include "emulated_intrinsics.h"
#include "emulated_names.h"
#include "../src/kernels_amx.cpp"
