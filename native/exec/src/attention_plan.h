// How the tokens of an attention call are grouped, and memory for partial results.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "scratch.h"

namespace freetoken::exec {

// Consecutive tokens of one sequence that share a pass over its keys.
struct AttentionRun {
  std::size_t first_token;
  std::size_t tokens_count;
  std::size_t sequence;
  std::int64_t key_end;    // one more than the last token's position
  std::size_t first_part;  // of kv head 0; parts of one head are adjacent
  std::size_t splits_count;
};

struct AttentionPlan {
  std::vector<AttentionRun> runs;
  std::size_t parts_count = 0;
  std::size_t queries_max = 0;    // per run and kv head
  std::int64_t split_tokens = 0;  // keys of one part; a multiple of the page
  std::size_t workspace_floats = 0;
  std::size_t part_floats = 0;
  Scratch workspaces;  // per worker
  Scratch parts;       // per (run, kv head, split), when splits run in parallel
};

}  // namespace freetoken::exec
