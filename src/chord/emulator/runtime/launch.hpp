// The C interface of the emulator.
#pragma once

// One compiled kernel.
struct ChordUnit {
  void (*entry)(const void* params);
  int threads;
  int smem_bytes;
};

// One tensor that the kernel may touch; `use` as in global_memory.hpp.
struct ChordTensor {
  const char* name;
  void* begin;
  unsigned long long bytes;
  int use;
};

extern "C" {
// Every unit defines it.
extern const ChordUnit chord_unit;

// Runs a launch of `blocks` co-resident blocks. Returns 0, or 1 with the reason in `error`.
int chord_emulator_run(const ChordUnit* unit, const void* params, int blocks,
                       unsigned long long seed, const ChordTensor* tensors, int num_tensors,
                       char* error, int error_bytes);
}
