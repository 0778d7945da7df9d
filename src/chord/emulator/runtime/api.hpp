// What the host's chord::ptx functions call: one function an instruction, with the place in the
// kernel's source that every report names.
#pragma once

#include <cstdint>
#include <source_location>

namespace chord::emulator {

using Where = std::source_location;

// sync.cpp
int thread_index();
int block_index();
int block_count();
void sync_block(Where where);
bool sync_block_and(bool predicate, Where where);
void sync_warp(Where where);
void sync_named(int id, int threads, Where where);
std::uint32_t ballot(bool predicate, Where where);
int shuffle(int value, int source_lane, Where where);
int shuffle_up(int value, int delta, Where where);
int sum_lanes(int value, Where where);
std::uint32_t match(int value, Where where);
void fence_proxy_async(Where where);
void wait_for_kernel_before();
void set_registers(int registers, bool raise, Where where);
void trap(Where where);

// access.cpp
void read_shared(std::uint32_t address, void* value, int bytes, Where where);
void write_shared(std::uint32_t address, const void* value, int bytes, Where where);
void add_shared(std::uint32_t address, std::uint32_t value, Where where);
void prefetch(const void* address, Where where);
void read_global(const void* address, void* value, int bytes, Where where);
void write_global(void* address, const void* value, int bytes, Where where);
void write_partial(void* address, const void* value, int bytes, Where where);
void read_partial(const void* address, void* value, int bytes, Where where);
void write_counter(std::uint32_t* address, std::uint32_t value, Where where);
std::uint32_t atomic_add(std::uint32_t* address, std::uint32_t value, Where where);

// mbarrier.cpp
void mbarrier_init(std::uint32_t barrier, int arrivals, Where where);
void fence_mbarrier_init(Where where);
void mbarrier_arrive(std::uint32_t barrier, Where where);
void mbarrier_arrive_expect_bytes(std::uint32_t barrier, int bytes, Where where);
void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity, Where where);

// copy.cpp
void bulk_load(std::uint32_t target, const void* source, int bytes, std::uint32_t barrier,
               Where where);
void tensor_load_2d(std::uint32_t target, const void* map, int k, int row, std::uint32_t barrier,
                    Where where);
void cp_async(std::uint32_t target, const void* source, bool valid, Where where);
void mbarrier_arrive_after_cp_async(std::uint32_t barrier, Where where);

// matrix.cpp
void mma_m16n8k16(float* d, const std::uint32_t* a, std::uint32_t b0, std::uint32_t b1,
                  Where where);
void load_matrix_x4(std::uint32_t* registers, std::uint32_t row, Where where);
void store_matrix_x4_transposed(std::uint32_t row, const std::uint32_t* registers, Where where);

// wgmma.cpp
void wgmma_fence(Where where);
void wgmma_commit(Where where);
void wgmma_pin(const float* d, Where where);
void wgmma_wait(int pending, Where where);
void wgmma(float* d, int eights, const std::uint32_t* a, std::uint64_t descriptor, Where where);

// bf16.cpp
std::uint32_t fma_bf16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c);
std::uint32_t mul_bf16x2(std::uint32_t a, std::uint32_t b);
std::uint32_t pack_bf16x2(float low, float high, Where where);
float half_to_float(std::uint16_t bits);

}  // namespace chord::emulator
