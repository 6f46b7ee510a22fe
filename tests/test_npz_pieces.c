/* The tests of .npy and .npz with no member inflated at once: the header first, then the data. */
#define SPDL__NPZ_AT_ONCE 0
#define test_table_npz test_table_npz_in_pieces
#include "test_npz.c"
