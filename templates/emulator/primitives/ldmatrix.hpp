inline void ldmatrix(u32 (&matrices)[4], u32 address) { emulator::load_matrices(matrices, address, false); }
