// The warp's matrix instructions: mma, ldmatrix, stmatrix.
#include <cstring>

#include "api.hpp"
#include "bf16.hpp"
#include "machine.hpp"

namespace chord::emulator {

namespace {

struct MmaArguments {
  float* d;
  const std::uint32_t* a;
  std::uint32_t b[2];
};

struct MatrixArguments {
  std::uint32_t* registers;
  std::uint32_t row;
  Where where;
};

MatrixArguments& matrix_of(Warp& warp, int lane) {
  return *static_cast<MatrixArguments*>(warp.arguments[lane]);
}

void multiply(Warp& warp) {
  float b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const auto& own = *static_cast<MmaArguments*>(warp.arguments[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int half = 0; half < 2; ++half) {
      b[2 * t + 8 * half][g] = bf16_to_float(own.b[half] & 0xffff);
      b[2 * t + 8 * half + 1][g] = bf16_to_float(own.b[half] >> 16);
    }
  }
  for (int g = 0; g < 8; ++g) {
    for (int upper = 0; upper < 2; ++upper) {
      float a[16], sums[8];
      for (int t = 0; t < 4; ++t) {
        const auto& own = *static_cast<MmaArguments*>(warp.arguments[4 * g + t]);
        for (int half = 0; half < 2; ++half) {
          const std::uint32_t pair = own.a[upper + 2 * half];
          a[2 * t + 8 * half] = bf16_to_float(pair & 0xffff);
          a[2 * t + 8 * half + 1] = bf16_to_float(pair >> 16);
        }
        sums[2 * t] = own.d[2 * upper];
        sums[2 * t + 1] = own.d[2 * upper + 1];
      }
      for (int k = 0; k < 16; ++k) {
        for (int column = 0; column < 8; ++column) sums[column] += a[k] * b[k][column];
      }
      for (int t = 0; t < 4; ++t) {
        const auto& own = *static_cast<MmaArguments*>(warp.arguments[4 * g + t]);
        own.d[2 * upper] = sums[2 * t];
        own.d[2 * upper + 1] = sums[2 * t + 1];
      }
    }
  }
}

// Fails as lane `lane`, which the instruction works for.
void check_row(Warp& warp, int lane, std::uint32_t row, Where where) {
  std::string why = warp.block->shared.reject(row, 16, 16);
  if (!why.empty()) fail(where, text("(row address of lane %d) ", lane) + why);
}

void load_matrix(Warp& warp) {
  Block& block = *warp.block;
  SharedMemory& shared = block.shared;
  const Where where = matrix_of(warp, 0).where;
  const std::uint16_t place = place_of(where);
  for (int lane = 0; lane < 32; ++lane) check_row(warp, lane, matrix_of(warp, lane).row, where);
  for (int lane = 0; lane < 32; ++lane) {
    Thread& thread = *block.threads[warp.index * 32 + lane];
    for (int matrix = 0; matrix < 4; ++matrix) {
      const std::uint32_t address = matrix_of(warp, 8 * matrix + lane / 4).row + 4 * (lane % 4);
      Granule& granule = shared.granule(address);
      std::string why = shared.reject_read(granule, thread.knowledge.seen, block.slots);
      if (!why.empty()) fail(where, text("(for lane %d) ", lane) + why);
      shared.note_read(granule, {static_cast<std::uint16_t>(thread.index), place, thread.clock()});
      std::memcpy(&matrix_of(warp, lane).registers[matrix], shared.at(address), 4);
    }
  }
}

void store_matrix(Warp& warp) {
  Block& block = *warp.block;
  SharedMemory& shared = block.shared;
  const Where where = matrix_of(warp, 0).where;
  const Epoch epoch{static_cast<std::uint16_t>(block.slots.collective(warp.index)), place_of(where),
                    ++warp.stores};
  for (int row = 0; row < 32; ++row) {
    Thread& thread = *block.threads[warp.index * 32 + row];
    const std::uint32_t address = matrix_of(warp, row).row;
    check_row(warp, row, address, where);
    for (int offset = 0; offset < 16; offset += 4) {
      Granule& granule = shared.granule(address + offset);
      std::string why = shared.reject_write(granule, thread.knowledge, false, block.slots);
      if (!why.empty()) fail(where, text("(row of lane %d) ", row) + why);
      shared.note_write(granule, epoch);
    }
    // Row `row % 8` of the stored matrix is a column of what the lanes hold.
    const int matrix = row / 8, column = row % 8;
    for (int element = 0; element < 8; ++element) {
      const std::uint32_t pair = matrix_of(warp, 4 * element + column / 2).registers[matrix];
      const auto half = static_cast<std::uint16_t>(column % 2 == 0 ? pair : pair >> 16);
      std::memcpy(shared.at(address + 2 * element), &half, 2);
    }
  }
}

}  // namespace

void mma_m16n8k16(float* d, const std::uint32_t* a, std::uint32_t b0, std::uint32_t b1,
                  Where where) {
  MmaArguments mine{d, a, {b0, b1}};
  meet(Collective::kMma, where, &mine, multiply);
}

void load_matrix_x4(std::uint32_t* registers, std::uint32_t row, Where where) {
  MatrixArguments mine{registers, row, where};
  meet(Collective::kLoadMatrix, where, &mine, load_matrix);
}

void store_matrix_x4_transposed(std::uint32_t row, const std::uint32_t* registers, Where where) {
  MatrixArguments mine{const_cast<std::uint32_t*>(registers), row, where};
  meet(Collective::kStoreMatrix, where, &mine, store_matrix);
}

}  // namespace chord::emulator
