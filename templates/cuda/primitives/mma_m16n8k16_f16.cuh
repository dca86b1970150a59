// d += A[16, 16] * B[8, 16]^T, f16 in, fp32 out; a warp executes it, operands as ldmatrix gives them: of A the matrices
// (upper, left), (lower, left), (upper, right), (lower, right), of B left and right. Lane l: d[2h + j] is row l / 4 +
// 8h, column 2 (l % 4) + j.
__device__ __forceinline__ void mma_m16n8k16_f16(float* d, const u32 (&a)[4], u32 b_left, u32 b_right) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_left), "r"(b_right));
}
