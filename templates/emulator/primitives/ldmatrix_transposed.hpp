inline void ldmatrix_transposed(u32 (&matrices)[4], u32 address) { emulator::load_matrices(matrices, address, true); }
