/* Parameter sweep of an oscillator: cheap and costly methods on two paths, reduced in input order.
 */
#include "spdl.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
enum { A = 12, B = 10, N = A * B };
typedef struct P {
    int a, b;
    double x;
} P;
static void euler(P *p) {
    double x = 1, v = 0, h = 1e-3;
    for (int i = 0; i < 2000; i++) {
        double f = -x * (1 + p->a) - v * p->b * 0.1;
        x += h * v, v += h * f;
    }
    p->x = x;
}
static void fine(P *p) {
    double x = 1, v = 0, h = 1e-5;
    for (int i = 0; i < 100000; i++) {
        double f = -x * (1 + p->a) - v * p->b * 0.1;
        x += h * v, v += h * f;
    }
    p->x = x;
}
static bool stiff(const P *p) { return p->a * p->b > 40; }
static void set(P *p, uint64_t i) { p->a = (int)(i / B), p->b = (int)(i % B), p->x = NAN; }
SPDL_FN(point, spdl_index, P) {
    if ((*out = spdl_buffer(task)) == NULL) return SPDL_E_NOMEM;
    set(*out, in->index);
    return SPDL_OK;
}
SPDL_FN(choose, P, P) {
    *out = in;
    return spdl_route(task, stiff(in));
}
SPDL_FN(run_euler, P, P) {
    euler(in);
    *out = in;
    return SPDL_OK;
}
SPDL_FN(run_fine, P, P) {
    fine(in);
    *out = in;
    return SPDL_OK;
}
int main(int argc, char **argv) {
    spdl_pipeline *p;
    P *x, w;
    double sum = 0, want = 0;
    int n = 0, bad = 0;
    spdl_pipeline_desc desc = { .workers = argc > 1 ? atoi(argv[1]) : 0 };
    if (spdl_pipeline_create(
            &p, &desc,
            SPDL_STAGES(SPDL_COUNT(N),
                        SPDL_PIPE(point, .item_bytes = sizeof(P), .free_item = spdl_buffer_free),
                        SPDL_BRANCH(choose), SPDL_PATH("cheap"),
                        SPDL_PIPE(run_euler, .concurrency = SPDL_ALL), SPDL_PATH("costly"),
                        SPDL_PIPE(run_fine, .concurrency = SPDL_ALL), SPDL_MERGE(), SPDL_SINK(8))))
        return 1;
    while (SPDL_NEXT(p, &x, SPDL_FOREVER) == SPDL_OK) {
        bad += x->a * B + x->b != n++;
        sum = sum * 1.0001 + x->x; /* depends on the order */
        spdl_buffer_free(x);
    }
    if (spdl_pipeline_failed(p)) puts(spdl_pipeline_error(p)->text);
    spdl_pipeline_destroy(p);
    for (int i = 0; i < N; i++) {
        set(&w, (uint64_t)i);
        if (stiff(&w)) fine(&w);
        else euler(&w);
        want = want * 1.0001 + w.x;
    }
    printf("sweep: %d of %d, sum %.17g, %.17g expected, %d bad: %s\n", n, N, sum, want, bad,
           bad || n != N || sum != want ? "WRONG" : "right");
}
