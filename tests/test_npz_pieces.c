/* The tests of .npy and .npz where no member is inflated at once: first the header, then the data. */
#define SPDL__NPZ_AT_ONCE 0
#define test_table_npz test_table_npz_in_pieces
#include "test_npz.c"
