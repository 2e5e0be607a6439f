// SPDX-License-Identifier: Apache-2.0
// The work of attention on a CPU: an item is one tile of packed rows (query rows x heads of one K/V
// group) over one split of its keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/paged_attention.h"

namespace dflash::cpu {

constexpr int kLanes = 8;
constexpr int kMaxVectors = 3;
constexpr int kTileM = kLanes * kMaxVectors;
constexpr int kSplitKeys = 128;
constexpr int kSplitBelow = 16;  // tiles; with more of them the threads are busy without splits

struct Item {
  int req, kv_head;
  int first_row, num_rows;  // packed
  KeyRange keys;            // of this split
  int tile;                 // counts the tiles of the call
  int split, num_splits;
  int64_t part;  // where the tile's partial results start
};

inline int num_lanes(int num_rows) { return (num_rows + kLanes - 1) / kLanes * kLanes; }

// Rows of request r, from *begin on; never past num_rows whatever the offsets hold.
inline int request_rows(const PagedAttentionParams& p, int r, int* begin) {
  *begin = std::min(std::max(p.query_start_loc[r], 0), p.num_rows);
  return std::max(std::min(p.query_start_loc[r + 1], p.num_rows) - *begin, 0);
}

// The tiles of every request, late ones (which see the most keys) first.
inline std::vector<Item> make_tiles(const PagedAttentionParams& p) {
  std::vector<Item> tiles;
  const int ratio = p.num_heads / p.num_kv_heads;
  for (int r = 0; r < p.num_reqs; ++r) {
    int begin;
    const int query_len = request_rows(p, r, &begin);
    const int num_rows = query_len * ratio;
    for (int first = (num_rows - 1) / kTileM * kTileM; num_rows > 0 && first >= 0;
         first -= kTileM) {
      const int rows = std::min(kTileM, num_rows - first);
      const KeyRange keys =
          tile_keys(p.mask, p.seq_lens[r], query_len, first / ratio, (first + rows - 1) / ratio);
      for (int head = 0; head < p.num_kv_heads; ++head) {
        tiles.push_back({r, head, first, rows, keys, static_cast<int>(tiles.size()), 0, 1, 0});
      }
    }
  }
  return tiles;
}

// One item a tile, or one for each kSplitKeys keys: when there are few tiles, and with num_splits,
// which keeps a row's sums from depending on the number of tiles.
inline std::vector<Item> split_tiles(const PagedAttentionParams& p, const std::vector<Item>& tiles,
                              int64_t* part_floats) {
  std::vector<Item> items;
  *part_floats = 0;
  const bool split = p.num_splits > 0 || tiles.size() < kSplitBelow;
  for (Item item : tiles) {
    const int first_split = item.keys.begin / kSplitKeys;
    item.num_splits =
        split ? std::max(ceil_div(item.keys.end, kSplitKeys) - first_split, 1) : 1;
    item.part = *part_floats;
    if (item.num_splits > 1)
      *part_floats += int64_t{item.num_splits} * num_lanes(item.num_rows) * (2 + p.head_dim);
    const KeyRange keys = item.keys;
    for (item.split = 0; item.split < item.num_splits; ++item.split) {
      if (item.num_splits > 1) {
        const int first = (first_split + item.split) * kSplitKeys;
        item.keys = {std::max(first, keys.begin), std::min(first + kSplitKeys, keys.end)};
      }
      items.push_back(item);
    }
  }
  return items;
}

inline int64_t total_products(const std::vector<Item>& items, int head_dim) {
  int64_t sum = 0;
  for (const Item& item : items)
    sum += int64_t{item.num_rows} * (item.keys.end - item.keys.begin) * head_dim;
  return sum;
}

}  // namespace dflash::cpu
