// Choice of the instruction set at run time.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "kernels.h"

namespace freetoken::exec {

// Names of the instruction sets that this build has and this machine runs, best first.
std::vector<std::string> available_isas();

// "auto" is the best available one. Throws std::invalid_argument for a name that does not exist
// and std::runtime_error for one that this machine cannot run.
const Kernels* select_kernels(std::string_view isa);

}  // namespace freetoken::exec
