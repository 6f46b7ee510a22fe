/* Two pools of one pipeline: a row with threads of its own beside the rows of the pool.
   spdl__wake_hint and spdl__pool_park of >>claim-impl and >>pool-impl, as in sit.pml, but each hint
   looks at the sleepers of the pool of the row it looks at.

   Rows 0 (a source), 1 and 2, in input order, limit 1, room for CAP behind each. Worker 0 runs rows
   0 and 2, worker 1 row 1. A trainer takes ROOMS results. Every call may end or never end, any
   sitting may end behind any item.

   Checked: when nothing moves any more, no row is runnable while the worker of its pool sleeps.

   Switches that take out one part of the protocol, and must fail:
     OWN_POOL       a hint looks at the sleepers of its own pool
     NO_NEXT        no look at the row that reads what was put
     NO_PREV        no look at the row that writes where room was made
     NO_TAKE_HINT   no hint between take and call
     NO_LEAVE_HINT  who leaves hints nobody; its own look does not see the other pool
     NO_CLEAR       `waking` is not cleared before the second look
     NO_RECHECK     no second look
     LATE_WORD      the bell is read after the second look */

#ifndef ITEMS
#define ITEMS 2
#endif
#ifndef CAP
#define CAP 1
#endif
#ifndef ROOMS
#define ROOMS 1
#endif
#define PROCS 3
#define TRAINER 2
#define W(n) (n)
#define THEAD 3
#define STAMP(e, t) (4 + (e) * ITEMS + (t))
#define ADDRESSES (4 + 2 * ITEMS)

/* only ever changed by read-modify-writes */
byte sleepers[2], bell[2];
bit waking[2];
bool asleep[2];

#include "tso.pml"

#define POOL(n) ((n) == 1 -> 1 : 0)
#ifdef OWN_POOL
#define ITS_POOL(n) pool
#else
#define ITS_POOL(n) POOL(n)
#endif
#define HD(w) ((w) / 2)
#define AC(w) ((w) & 1)
#define READY(p, n, h)                                                                             \
    ((n) == 0 -> (h) < ITEMS                                                                       \
              : ((h) < ITEMS &&                                                                    \
                  LOAD(p, STAMP(((n) == 0 -> 0 : (n) - 1), ((h) < ITEMS -> (h) : 0))) == 1))
#define HEAD_BEHIND(p, n) ((n) == 2 -> LOAD(p, THEAD) : HD(LOAD(p, W(((n) == 2 -> 2 : (n) + 1)))))
#define RUNS(p, n, w) (AC(w) == 0 && READY(p, n, HD(w)) && HD(w) < HEAD_BEHIND(p, n) + CAP)

/* one row, of any pool */
inline look_at(p, n, c) {
    if
    :: sleepers[c] == 0 || waking[c]
    :: else ->
        w2 = LOAD(p, W(n));
        found = RUNS(p, n, w2);
        w2 = 0;
        if
        :: found ->
            d_step { found = waking[c] == 0; waking[c] = 1 };
            if
            :: found -> d_step { bell[c]++; found = false; asleep[c] = false }
            :: else
            fi
        :: else
        fi
    fi
}

/* Behind a read-modify-write. All rows of the own pool are in good hands: its worker is here. */
inline hint(p, n) {
#ifndef NO_NEXT
    if
    :: n == 0 -> look_at(p, 1, ITS_POOL(1))
    :: n == 1 -> look_at(p, 2, ITS_POOL(2))
    :: else
    fi;
#endif
#ifndef NO_PREV
    if
    :: n == 2 -> look_at(p, 1, ITS_POOL(1))
    :: n == 1 -> look_at(p, 0, ITS_POOL(0))
    :: else
    fi;
#endif
    skip
}

proctype Worker(byte me; byte pool) {
    byte word, w1, w2, row, h;
    bool found, mine, taken;
step:
    row = (me == 0 -> 2 : 1);
take:
    w1 = LOAD(me, W(row));
    if
    :: (mine || AC(w1) == 0) && READY(me, row, HD(w1)) && HD(w1) < HEAD_BEHIND(me, row) + CAP ->
        h = HD(w1);
        d_step {
            FENCED(me);
            taken = mem[W(row)] == w1;
            if
            :: taken -> mem[W(row)] = w1 + 2 + (mine -> 0 : 1)
            :: else -> h = 0
            fi;
            w1 = 0
        }
    :: else -> w1 = 0
    fi;
    if
    :: !taken -> goto leave
    :: else -> d_step { taken = false; mine = true }
    fi;
#ifndef NO_TAKE_HINT
    hint(me, row);
#endif
    if
    :: true
    :: true ->
end_in_call:
        false
    fi;
    if
    :: row < 2 -> store(me, STAMP(row, h), 1)
    :: else
    fi;
    h = 0;
    if
    :: goto take
    :: true
    fi;
leave:
    if
    :: mine ->
        d_step { FENCED(me); mem[W(row)] = mem[W(row)] - 1; mine = false };
#ifndef NO_LEAVE_HINT
        hint(me, row);
#endif
        goto step
    :: else
    fi;
    if
    :: row == 2 -> row = 0; goto take
    :: else
    fi;
    /* spdl__pool_park */
    word = bell[me];
    d_step { FENCED(me); sleepers[me]++ };
#ifndef NO_CLEAR
    d_step { FENCED(me); waking[me] = 0 };
#endif
#ifndef NO_RECHECK
    if
    :: me == 0 ->
        w2 = LOAD(me, W(2));
        found = RUNS(me, 2, w2);
        if
        :: !found -> w2 = LOAD(me, W(0)); found = RUNS(me, 0, w2)
        :: else
        fi
    :: else -> w2 = LOAD(me, W(1)); found = RUNS(me, 1, w2)
    fi;
    w2 = 0;
#endif
#ifdef LATE_WORD
    word = bell[me];
#endif
    if
    :: found -> d_step { found = false; word = 0 }
    :: else ->
        d_step { asleep[me] = bell[me] == word; word = 0 }
end_asleep:
        !asleep[me]
    fi;
    d_step { FENCED(me); sleepers[me]-- };
    d_step { FENCED(me); waking[me] = 0 };
    goto step
}

/* takes at any moment: what it finds there is left out */
proctype Trainer() {
    byte takes, w2;
    bool found;
    do
    :: takes == ROOMS -> break
    :: else ->
        takes++;
        d_step { FENCED(TRAINER); mem[THEAD] = takes };
        look_at(TRAINER, 2, 0)
    od
}

init {
    atomic {
        run Worker(0, 0);
        run Worker(1, 1);
        run Trainer()
    }
    timeout;
    assert(!(asleep[0] && (RUNS(0, 0, mem[W(0)]) || RUNS(0, 2, mem[W(2)]))));
    assert(!(asleep[1] && RUNS(0, 1, mem[W(1)])))
}
