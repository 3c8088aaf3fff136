// The part of `_exec` that fills slots.
#pragma once
#include <pybind11/pybind11.h>

void bind_fill(pybind11::module_& module);
