// Activations arranged for the kernels: tokens of one group (all tokens of a linear layer, or
// those routed to one expert) in panels of similar width.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "scratch.h"
#include "worker_pool.h"

namespace freetoken::exec {

struct Panel {
  std::size_t first_row;  // into TokenGroups::rows
  int width;
};

struct Group {
  std::size_t expert;
  std::size_t first_panel;
  std::size_t panels_count;
  std::size_t tokens_count;
};

// Which rows of y belong to which group, and how each group is cut into panels.
class TokenGroups {
 public:
  // One group of all tokens; row i is token i.
  void all_tokens(std::size_t tokens, int max_width);
  // One group per expert that occurs; a row is a (token, slot) pair, slots of one token adjacent.
  void by_expert(const std::int32_t* expert_ids, std::size_t pairs, std::size_t experts_count,
                 int max_width);

  const std::vector<Group>& groups() const { return groups_; }
  const std::vector<Panel>& panels() const { return panels_; }
  const std::vector<std::uint32_t>& rows() const { return rows_; }

 private:
  void add_group(std::size_t expert, std::size_t first_row, std::size_t count, int max_width);

  std::vector<Group> groups_;
  std::vector<Panel> panels_;
  std::vector<std::uint32_t> rows_;
  std::vector<std::uint32_t> ends_;  // counting sort of the experts
};

// Memory of the packed panels of one call.
class Panels {
 public:
  // Space only (a kernel writes the panels). Offsets go by panel index.
  void reserve(const TokenGroups& groups, const PanelKernels& kernels, std::size_t columns);
  // Packs x[row / rows_per_token]; a token that is alone in several panels is packed once.
  void pack(const TokenGroups& groups, const PanelKernels& kernels, const Bf16* x,
            std::size_t tokens, std::size_t columns, std::size_t rows_per_token, WorkerPool& pool);

  std::byte* at(std::size_t panel) { return data_ + offsets_[panel]; }

 private:
  Scratch memory_;
  std::byte* data_ = nullptr;
  std::vector<std::size_t> offsets_;
  std::vector<std::size_t> to_pack_;
  std::vector<std::size_t> alone_;  // by token: its panel of width one
};

}  // namespace freetoken::exec
