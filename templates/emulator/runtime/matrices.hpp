// Warp-wide matrix operations: ldmatrix, and mma with 16 x 8 results. Lanes exchange their operands; each computes the results of
// its own registers.
namespace emulator {

// Publishes this lane's words to the warp, and returns those of all lanes.
template <int COUNT>
inline const u32 (*show(const u32 (&words)[COUNT]))[6] {
  Warp& warp = *machine->current->warp;
  u32 (*shown)[6] = warp.shown[warp.matrices.epoch % 2];
  if (warp.matrices.members != 32) fail("matrices want a whole warp, and this one has %d threads", warp.matrices.members);
  memcpy(shown[machine->current->index % 32], words, sizeof(words));
  meet(warp.matrices);
  return shown;
}

void load_matrices(u32 (&matrices)[4], u32 address, bool transposed) {
  Block& block = *machine->current->block;
  check_shared("loads a row of a matrix of", address, 16);
  const u32 (*rows)[6] = show<1>({address});
  i32 lane = machine->current->index % 32, first = lane / 4, second = lane % 4 * 2;
  for (i32 i = 0; i < 4; ++i) {
    if (!transposed) {
      shared_read(block, &matrices[i], rows[8 * i + first][0] + second * 2, 4);
      continue;
    }
    u16 pair[2];
    for (i32 j = 0; j < 2; ++j) shared_read(block, &pair[j], rows[8 * i + second + j][0] + first * 2, 2);
    memcpy(&matrices[i], pair, sizeof(pair));
  }
}

template <typename Element>
inline float half_of(u32 word, i32 which) {
  Element element = {static_cast<u16>(word >> which * 16)};
  return wide(element);
}

template <typename Element>
inline void multiply_fragments(float* d, const u32 (&a)[4], u32 b_left, u32 b_right) {
  const u32 (*of)[6] = show<6>({a[0], a[1], a[2], a[3], b_left, b_right});
  i32 lane = machine->current->index % 32;
  for (i32 h = 0; h < 2; ++h) {
    for (i32 j = 0; j < 2; ++j) {
      float sum = 0.0f;
      for (i32 k = 0; k < 16; ++k) {
        i32 right = k / 8, quad_lane = k % 8 / 2;  // the lane that holds the two values of a row or column
        float x = half_of<Element>(of[lane / 4 * 4 + quad_lane][2 * right + h], k % 2);
        float y = half_of<Element>(of[(lane % 4 * 2 + j) * 4 + quad_lane][4 + right], k % 2);
        sum += x * y;
      }
      d[2 * h + j] += sum;
    }
  }
}

void multiply_fragments_bf16(float* d, const u32 (&a)[4], u32 b_left, u32 b_right) { multiply_fragments<bf16>(d, a, b_left, b_right); }
void multiply_fragments_f16(float* d, const u32 (&a)[4], u32 b_left, u32 b_right) { multiply_fragments<f16>(d, a, b_left, b_right); }

}  // namespace emulator
