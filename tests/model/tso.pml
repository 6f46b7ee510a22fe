/* Memory with a store buffer for each process, as on x86 (TSO): a store waits in the buffer of its
   process until the memory takes it, oldest first; a load sees the newest of its own waiting
   stores. Whoever includes this defines PROCS (the callers) and ADDRESSES. Words that are only
   ever changed by read-modify-writes need no address: plain variables will do.

   What is not here: loads that overtake loads, and stores that overtake stores. The header orders
   those with acquire and release, which costs nothing on x86. */

#define DEPTH 2 /* checked: a store that does not fit is an error of the model */

byte mem[ADDRESSES];
byte waiting[PROCS]; /* stores in the buffer */
byte buf_at[PROCS * DEPTH];
byte buf_value[PROCS * DEPTH];
byte pending[PROCS]; /* bits: buffers that the heavy barrier of this process still waits for */

#define LOAD(p, a)                                                                                 \
    ((waiting[p] > 1 && buf_at[(p) * DEPTH + 1] == (a)) -> buf_value[(p) * DEPTH + 1] :            \
     ((waiting[p] > 0 && buf_at[(p) * DEPTH] == (a)) -> buf_value[(p) * DEPTH] : mem[a]))

inline store(p, a, v) {
    d_step {
        assert(waiting[p] < DEPTH);
        buf_value[(p) * DEPTH + waiting[p]] = v;
        buf_at[(p) * DEPTH + waiting[p]] = a;
        waiting[p]++
    }
}

/* A full barrier, and the first half of every read-modify-write: the own buffer is empty. The
   memory can always empty it, so waiting for that is the same as doing it. */
#define FENCED(p) (waiting[p] == 0)

#define HOLDS(q) ((q) < PROCS && waiting[((q) < PROCS -> (q) : 0)] > 0 -> 1 << (q) : 0)

/* membarrier(2): at some moment between call and return, each other process has an empty buffer.
   The moments may differ, in any order. The first such moment of each is enough: a later one would
   only order more. */
inline membarrier(p) {
    atomic {
        FENCED(p);
        pending[p] = HOLDS(0) | HOLDS(1) | HOLDS(2) | HOLDS(3) | HOLDS(4)
    }
    pending[p] == 0
}

inline drain_one(p) {
    d_step {
        waiting[p] > 0;
        mem[buf_at[(p) * DEPTH]] = buf_value[(p) * DEPTH];
        buf_at[(p) * DEPTH] = buf_at[(p) * DEPTH + 1];
        buf_value[(p) * DEPTH] = buf_value[(p) * DEPTH + 1];
        buf_at[(p) * DEPTH + 1] = 0;
        buf_value[(p) * DEPTH + 1] = 0;
        waiting[p]--;
        if
        :: waiting[p] == 0 ->
            pending[0] = pending[0] & ~(1 << (p));
            pending[1] = pending[1] & ~(1 << (p));
#if PROCS > 2
            pending[2] = pending[2] & ~(1 << (p));
#endif
#if PROCS > 3
            pending[3] = pending[3] & ~(1 << (p));
#endif
#if PROCS > 4
            pending[4] = pending[4] & ~(1 << (p));
#endif
        :: else
        fi
    }
}

active proctype Memory() {
end:
    do
    :: drain_one(0)
    :: drain_one(1)
#if PROCS > 2
    :: drain_one(2)
#endif
#if PROCS > 3
    :: drain_one(3)
#endif
#if PROCS > 4
    :: drain_one(4)
#endif
    od
}
