#include "panels.h"

#include <limits>

#include "layout.h"
#include "tiles.h"

namespace freetoken::exec {
namespace {

// Below this the calling thread packs alone: waking the others costs more.
constexpr std::size_t kPackAloneElements = std::size_t{64} << 10;

}  // namespace

void TokenGroups::add_group(std::size_t expert, std::size_t first_row, std::size_t count,
                            int max_width) {
  const std::size_t panels = ceil_div(count, static_cast<std::size_t>(max_width));
  groups_.push_back({.expert = expert,
                     .first_panel = panels_.size(),
                     .panels_count = panels,
                     .tokens_count = count});
  // Even widths: 7 tokens at a maximum of 6 are 4 + 3, not 6 + 1.
  for (std::size_t i = 0; i < panels; ++i) {
    const std::size_t width = count / panels + (i < count % panels ? 1 : 0);
    panels_.push_back({.first_row = first_row, .width = static_cast<int>(width)});
    first_row += width;
  }
}

void TokenGroups::all_tokens(std::size_t tokens, int max_width) {
  groups_.clear();
  panels_.clear();
  rows_.resize(tokens);
  for (std::size_t i = 0; i < tokens; ++i) rows_[i] = static_cast<std::uint32_t>(i);
  add_group(0, 0, tokens, max_width);
}

void TokenGroups::by_expert(const std::int32_t* expert_ids, std::size_t pairs,
                            std::size_t experts_count, int max_width) {
  groups_.clear();
  panels_.clear();
  ends_.assign(experts_count, 0);
  std::size_t routed = 0;
  for (std::size_t i = 0; i < pairs; ++i) {
    if (expert_ids[i] < 0) continue;
    ++ends_[static_cast<std::size_t>(expert_ids[i])];
    ++routed;
  }
  rows_.resize(routed);
  std::size_t first_row = 0;
  for (std::size_t expert = 0; expert < experts_count; ++expert) {
    const std::size_t count = ends_[expert];
    ends_[expert] = static_cast<std::uint32_t>(first_row);
    if (count > 0) add_group(expert, first_row, count, max_width);
    first_row += count;
  }
  for (std::size_t i = 0; i < pairs; ++i) {
    if (expert_ids[i] < 0) continue;
    rows_[ends_[static_cast<std::size_t>(expert_ids[i])]++] = static_cast<std::uint32_t>(i);
  }
}

void Panels::reserve(const TokenGroups& groups, const PanelKernels& kernels, std::size_t columns) {
  offsets_.clear();
  std::size_t end = 0;
  for (const Panel& panel : groups.panels()) {
    offsets_.push_back(end);
    end += round_up(kernels.bytes(columns, panel.width), Scratch::kAlignment);
  }
  data_ = memory_.get<std::byte>(end);
}

void Panels::pack(const TokenGroups& groups, const PanelKernels& kernels, const Bf16* x,
                  std::size_t tokens, std::size_t columns, std::size_t rows_per_token,
                  WorkerPool& pool) {
  constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();
  offsets_.clear();
  to_pack_.clear();
  alone_.assign(tokens, kNone);
  std::size_t end = 0;
  for (std::size_t i = 0; i < groups.panels().size(); ++i) {
    const Panel& panel = groups.panels()[i];
    std::size_t& alone = alone_[groups.rows()[panel.first_row] / rows_per_token];
    if (panel.width == 1 && alone != kNone) {
      offsets_.push_back(alone);
      continue;
    }
    if (panel.width == 1) alone = end;
    offsets_.push_back(end);
    to_pack_.push_back(i);
    end += round_up(kernels.bytes(columns, panel.width), Scratch::kAlignment);
  }
  data_ = memory_.get<std::byte>(end);
  const auto pack_one = [&](std::uint32_t index, int) noexcept {
    const std::size_t number = to_pack_[index];
    const Panel& panel = groups.panels()[number];
    const Bf16* rows[kWidestPanel];
    for (int i = 0; i < panel.width; ++i) {
      const std::size_t row = panel.first_row + static_cast<std::size_t>(i);
      rows[i] = x + groups.rows()[row] / rows_per_token * columns;
    }
    kernels.pack(rows, panel.width, columns, at(number));
  };
  if (to_pack_.size() * columns < kPackAloneElements) {
    for (std::uint32_t i = 0; i < to_pack_.size(); ++i) pack_one(i, 0);
  } else {
    pool.run(to_pack_.size(), pack_one);
  }
}

}  // namespace freetoken::exec
