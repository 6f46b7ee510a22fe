/* What each recipe in this folder builds: the implementation, and a pipeline on it. */
#define SPDL_IMPLEMENTATION
#include <spdl.h>
#include <stdio.h>
#include <stdlib.h>

SPDL_FN(count, void, int) {
    if (spdl_sequence(task) == 10) return SPDL_END;
    if ((*out = malloc(sizeof(int))) == NULL) return SPDL_E_NOMEM;
    **out = (int)spdl_sequence(task);
    return SPDL_OK;
}

int main(void) {
    spdl_pipeline_desc desc = { 0 };
    spdl_pipeline *p;
    int *n, sum = 0;
    desc.workers = 2;
    if (spdl_pipeline_create(&p, &desc, SPDL_STAGES(
            SPDL_SOURCE(count, .free_item = free), SPDL_SINK(3))) != SPDL_OK) return 1;
    while (SPDL_NEXT(p, &n, SPDL_FOREVER) == SPDL_OK) {
        sum += *n;
        free(n);
    }
    spdl_pipeline_destroy(p);
    printf("spdl %s: %d\n", spdl_version(), sum);
    return sum != 45;
}
