/* What budget_count.c has for budget_writes.c. */
#ifndef BUDGET_COUNT_H_INCLUDED
#define BUDGET_COUNT_H_INCLUDED

#include <stdint.h>

void count_begin(void);

/* Prints a line for each place that wrote or read the clock: its address, then writes, stores and
   clock reads of an item. */
void count_end(uint64_t items);

#endif /* BUDGET_COUNT_H_INCLUDED */
