/* The tests of .npy and .npz where the first run of a decoder makes no whole header: that needs
   memory of its own, and the data go straight to the caller's. */
#define SPDL__NPZ_HEAD 64
#define test_table_npz test_table_npz_in_pieces
#include "test_npz.c"
