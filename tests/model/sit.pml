/* Who wakes whom: spdl__flow_sit, spdl__flow_hole, spdl__wake_hint and spdl__pool_park of
   >>flow-impl, >>mark-impl, >>wake-impl and >>pool-impl, with the trainer that takes and waits
   (spdl__next_wait of >>next-impl).

   Rows 0 (a source, limit 1), 1 (limit LIM1) and 2 (limit LIM2), in input order, room for CAP0,
   CAP1 and CAP2 (buffer and limit) behind them; WORKERS workers; a trainer that takes ROOMS items
   and then goes on to something else, maybe after it has asked whether its buffer is full. Every
   call may end or never end, any sitting may end behind any item. A row's word is head * 4 +
   active; one compare-and-swap takes an item. Each put is followed by a read-modify-write of the
   word (next take, or leave) and a look at who sleeps.

   Checked: when nothing moves any more, no row is runnable while a worker sleeps, and the trainer
   does not sleep while its next item is there. Low watermark: a take of the trainer hints row 2
   only when at most half of CAP2 is on its way. So row 2 may be left alone for room the trainer
   made, but not below the watermark, not while the trainer waits, and not when it has asked.

     -DPARKED   begins with all workers asleep and all edges full
     -DLAST     so does this: row 2 alone, a call of it that hangs, the results behind it ready
     -DPAIRS    calls are long: a worker that begins one wakes two
     -DNO_SLEEP the trainer never sleeps, which makes the model smaller
     -DHOLES    row 0 has ended; row 1 drops item HOLE, for which row 2 makes no result. Who passes
                the hole enters row 2 by one swap, raises `dropped`, and moves the head by another
                swap; if that fails it lowers `dropped` again and leaves. Worker 0 is a guest, who
                may go then. Also checked: row 1 promises no more than has room

   Switches that take out one part of the protocol, and must fail:
     NO_NEXT         no look at the row that reads what was put
     NO_PREV         no look at the row that writes where room was made
     NO_ALL          the first take of a sitting looks at nothing
     NO_TAKE_HINT    no hint between take and call of later items
     NO_LEAVE_HINT   who leaves looks for no trainer
     NO_TAKE_FENCE   the take is no full barrier
     EARLY_SLEEPERS  `sleepers` is loaded before the take, as AArch64 may without a fence behind it
     EARLY_LOOK      the trainer does so with its own take
     NO_WRAP         the search for a worker ends at the last one
     NO_CLEAR_AFTER  `waking` is not cleared behind the sleep
     NO_RECHECK      no second look
     LATE_WORD       the bell is read after the second look
     NO_TRAINER_LOOK the trainer does not look again once it has said that it waits
     LATE_FED        `fed` is read after that look
     PLAIN_WAITING   `waiting` is stored, without a full barrier before the second look
     DEAF_ROOM       a take of the trainer hints nobody
     NO_WAIT_HINT    a trainer that is about to sleep does not hint row 2 above the watermark
     NO_ASK_HINT     neither does one that asks
     LATE_DROPPED    `dropped` is raised behind the head
     NO_UNDO_HINT    nobody is woken when it is lowered again, as the swap has failed, nor by the
                     thread that leaves then */

#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef ITEMS
#define ITEMS 2
#endif
#ifndef LIM1
#define LIM1 2
#endif
#ifndef LIM2
#ifdef HOLES
#define LIM2 2
#else
#define LIM2 1
#endif
#endif
#ifndef ROOMS
#define ROOMS 1
#endif
#ifndef CAP0
#define CAP0 2
#endif
#ifndef CAP1
#define CAP1 2
#endif
#ifndef CAP2
#define CAP2 1
#endif
#ifndef HOLE
#define HOLE 1
#endif
#define PROCS (WORKERS + 1)
#define TRAINER WORKERS
#define W(n) (n)
#define THEAD 3
#define WAITING 4
#define STAMP(e, t) (5 + (e) * ITEMS + (t))
#define ADDRESSES (5 + 3 * ITEMS)

/* only ever changed by read-modify-writes; sleepers: workers, and 16 for the trainer */
byte sleepers, fed;
byte bell[WORKERS];
bit waking;

#ifdef HOLES
byte dropped, refunds[3];
byte tail2; /* results of row 2, which is in completion order */
#endif

bool asleep[WORKERS];
bool announced[WORKERS]; /* `asleep` of spdl__worker */
bool trainer_asleep, asked;

#include "tso.pml"

#ifdef NO_TAKE_FENCE
#define TAKE_FENCE true
#else
#define TAKE_FENCE FENCED(me)
#endif
#define LIMIT(n) ((n) == 1 -> LIM1 : ((n) == 2 -> LIM2 : 1))
#define HD(w) ((w) / 4)
#define AC(w) ((w) & 3)
#define READY(p, n, h)                                                                             \
    ((n) == 0 -> (h) < ITEMS                                                                       \
              : ((h) < ITEMS &&                                                                    \
                  LOAD(p, STAMP(((n) == 0 -> 0 : (n) - 1), ((h) < ITEMS -> (h) : 0))) > 0))
#define UNTIL(p, n)                                                                                \
    ((n) == 2 -> LOAD(p, THEAD) + CAP2                                                             \
              : ((n) == 1 -> HD(LOAD(p, W(2))) + CAP1 : HD(LOAD(p, W(1))) + CAP0))
#ifdef HOLES
#define AT(n, w) ((n) == 2 -> HD(w) - refunds[2] : HD(w)) /* results that are promised */
#define IS_HOLE(p, n, h) ((n) == 2 && (h) == HOLE && READY(p, n, h))
#define GONE(w) ((w) > HOLE) /* holes before the head */
#else
#define AT(n, w) HD(w)
#define IS_HOLE(p, n, h) false
#endif
#define FED(p, h) ((h) < ITEMS && LOAD(p, STAMP(2, ((h) < ITEMS -> (h) : 0))) == 1)

#ifdef LAST
#define LOWEST 2
#elif defined HOLES
#define LOWEST 1
#else
#define LOWEST 0
#endif

#ifdef HOLES
#define UNDER(p, n, w) (8 + AT(n, w) < u)
#define ITEM_READY(p, n, h) (READY(p, n, h) && !IS_HOLE(p, n, h))
/* spdl__edge_until, by 8 more */
inline room(p, n) {
    if
    :: n == 1 -> u = 8 + HD(LOAD(p, W(2))) + CAP1; u = u - dropped; u = u + refunds[1]
    :: else -> u = 8 + UNTIL(p, n)
    fi
}
#else
#define UNDER(p, n, w) (HD(w) < UNTIL(p, n))
#define ITEM_READY READY
#endif

/* spdl__row_runnable: one load in each step: word, stamp, room */
inline runnable(p, n) {
    w2 = LOAD(p, W(n));
    if
    :: AC(w2) >= LIMIT(n)
    :: else ->
        if
#ifdef HOLES
        :: IS_HOLE(p, n, HD(w2)) -> found = true
#endif
#ifdef HOLES
        :: READY(p, n, HD(w2)) && !IS_HOLE(p, n, HD(w2)) ->
            room(p, n);
            d_step { found = UNDER(p, n, w2); u = 0 }
#else
        :: READY(p, n, HD(w2)) -> found = UNDER(p, n, w2)
#endif
        :: else
        fi
    fi;
    w2 = 0
}

inline all_runnable(p) {
    runnable(p, 2);
#ifndef LAST
    if
    :: !found -> runnable(p, 1)
    :: else
    fi
#ifndef HOLES
    ;
    if
    :: !found -> runnable(p, 0)
    :: else
    fi
#endif
#endif
}

/* spdl__worker_wake */
inline ring(w) {
    d_step { found = announced[w]; announced[w] = false };
    if
    :: found -> bell[w]++; asleep[w] = false
    :: else
    fi
}

/* spdl__pool_wake, if found. pair: the calls are long, and it may wake two. The search may begin at
   any worker. */
inline wake(pair) {
    if
    :: found ->
        d_step { found = waking == 0; waking = 1 };
        if
        :: found ->
            if
            :: ring(0)
            :: ring(1)
#if WORKERS > 2
            :: ring(2)
#endif
            fi;
#ifndef NO_WRAP
            if
            :: !found -> ring(0)
            :: else
            fi;
            if
            :: !found -> ring(1)
            :: else
            fi;
#if WORKERS > 2
            if
            :: !found -> ring(2)
            :: else
            fi;
#endif
#endif
#ifdef PAIRS
            if
            :: found && pair ->
                ring(0);
                if
                :: !found -> ring(1)
                :: else
                fi;
                found = true
            :: else
            fi;
#endif
            if
            :: !found -> waking = 0
            :: else -> found = false
            fi
        :: else
        fi
    :: else
    fi
}

/* Behind a read-modify-write. first: of a sitting. */
inline hint(p, n, first) {
    if
    :: sleepers == 0
    :: else ->
        if
        :: n == 2 && sleepers >= 16 && LOAD(p, WAITING) == 1 ->
            w2 = LOAD(p, THEAD);
            if
            :: FED(p, w2) ->
                w2 = 0;
                d_step { FENCED(p); found = mem[WAITING] == 1; mem[WAITING] = 0 };
                if
                :: found -> d_step { fed++; found = false; trainer_asleep = false }
                :: else
                fi
            :: else -> w2 = 0
            fi
        :: else
        fi;
        if
        :: waking || (sleepers & 15) == 0
        :: else ->
            if
#ifndef NO_ALL
            :: first -> all_runnable(p)
#else
            :: first
#endif
            :: else ->
#ifndef NO_NEXT
                if
                :: n < 2 -> runnable(p, n + 1)
                :: else
                fi;
#endif
#ifndef NO_PREV
                if
                :: !found && n > LOWEST -> runnable(p, n - 1)
                :: else
                fi;
#endif
                skip
            fi;
            wake(first)
        fi
    fi
}

proctype Worker(byte me) {
    byte word, w1, w2, row, h, u;
    bool found, mine, taken;
#ifdef HOLES
    bool undone;
#endif
#ifdef EARLY_SLEEPERS
    byte early;
#endif
#if defined PARKED || defined LAST
    goto end_asleep;
#endif
step:
    row = 2;
take: /* a look that finds nothing is a take that fails at its first load */
    w1 = LOAD(me, W(row));
#ifdef HOLES
    if
    :: (mine || AC(w1) < LIMIT(row)) && IS_HOLE(me, row, HD(w1)) -> goto hole
    :: else
    fi;
    room(me, row);
#endif
    if /* the room may only grow and the stamp only come while the word stays */
    :: (mine || AC(w1) < LIMIT(row)) && UNDER(me, row, w1) && ITEM_READY(me, row, HD(w1)) ->
#ifdef HOLES
        u = 0;
#endif
        h = HD(w1);
#ifdef EARLY_SLEEPERS
        early = sleepers;
#endif
        d_step {
            TAKE_FENCE;
            taken = mem[W(row)] == w1;
            if
            :: taken -> mem[W(row)] = w1 + 4 + (mine -> 0 : 1)
            :: else -> h = 0
            fi;
            w1 = 0
        }
#ifdef HOLES
    :: else -> d_step { w1 = 0; u = 0 }
#else
    :: else -> w1 = 0
#endif
    fi;
    if
    :: !taken -> goto leave
    :: else -> taken = false
    fi;
#ifdef HOLES
    assert(row != 1 || HD(mem[W(1)]) - refunds[1] <= HD(mem[W(2)]) - GONE(HD(mem[W(2)])) + CAP1);
#endif
#if defined NO_TAKE_HINT
    if
    :: !mine -> hint(me, row, !mine)
    :: else
    fi;
#elif defined EARLY_SLEEPERS
    if
    :: early > 0 -> hint(me, row, !mine)
    :: else
    fi;
    early = 0;
#else
    hint(me, row, !mine);
#endif
    mine = true;
    if
    :: true
    :: true ->
end_in_call:
        false /* never ends */
    fi;
#ifdef HOLES
    if
    :: row == 1 && h == HOLE -> d_step { FENCED(me); refunds[1]++ }; store(me, STAMP(1, h), 2)
    :: row == 2 -> d_step { store(me, STAMP(2, tail2), 1); tail2++ }
    :: else -> store(me, STAMP(row, h), 1)
    fi;
    h = 0;
#else
    d_step { store(me, STAMP(row, h), 1); h = 0 };
#endif
    if
    :: goto take
    :: true
    fi;
#ifdef HOLES
    goto leave;
hole:
    skip;
    if
    :: !mine ->
        d_step {
            FENCED(me);
            mine = mem[W(2)] == w1;
            if
            :: mine -> mem[W(2)] = w1 + 1; w1++
            :: else -> w1 = 0
            fi
        };
        if
        :: !mine -> goto leave
        :: else
        fi
    :: else
    fi;
#ifndef LATE_DROPPED
    d_step { FENCED(me); dropped++ };
#endif
    d_step {
        FENCED(me);
        taken = mem[W(2)] == w1;
        if
        :: taken -> mem[W(2)] = w1 + 4
        :: else
        fi;
        w1 = 0
    };
#ifdef LATE_DROPPED
    d_step { FENCED(me); dropped++ };
#endif
    if
    :: taken ->
        taken = false;
        d_step { FENCED(me); refunds[2]++ };
        hint(me, row, false);
        goto take
    :: else
    fi;
    d_step { FENCED(me); dropped-- };
    undone = true;
#endif
leave:
    if
    :: mine ->
        d_step { FENCED(me); mem[W(row)] = mem[W(row)] - 1; mine = false };
#ifdef HOLES
        if
        :: undone ->
            undone = false;
#ifndef NO_UNDO_HINT
            hint(me, row, false);
#endif
            if
            :: me == 0 -> goto end_guest
            :: true
            fi
        :: else
        fi;
#endif
        /* the rows are looked at in the next step; if it takes, then before the call */
#ifndef NO_LEAVE_HINT
        if
        :: row == 2 && sleepers >= 16 -> hint(me, row, false)
        :: else
        fi;
#endif
        goto step
    :: else
    fi;
next_row:
    if
    :: row > LOWEST -> row--; goto take
    :: else
    fi;
    /* spdl__pool_park */
    word = bell[me];
    announced[me] = true;
    d_step { FENCED(me); sleepers++ };
    /* with a bell for each worker this was not found to be needed; it is kept */
    d_step { FENCED(me); waking = 0 };
#ifndef NO_RECHECK
    all_runnable(me);
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
    d_step { FENCED(me); sleepers-- };
    announced[me] = false;
#ifndef NO_CLEAR_AFTER
    d_step { FENCED(me); waking = 0 };
#endif
    goto step;
#ifdef HOLES
end_guest:
    false
#endif
}

/* a hint for row 2 by the trainer, behind a read-modify-write */
inline hint_last() {
    if
    :: waking || (sleepers & 15) == 0
    :: else -> runnable(TRAINER, 2); wake(false)
    fi
}

#ifdef EARLY_LOOK
#define SEES_SLEEPERS (word & 15) > 0
#else
#define SEES_SLEEPERS true
#endif

/* the pauses and yields before the sleep are looks like others and left out */
proctype Trainer() {
    byte takes, w2, word, u;
    bool found;
end_takes:
    do
    :: takes == ROOMS -> break
    :: FED(TRAINER, takes) ->
        takes++;
#ifdef EARLY_LOOK
        word = sleepers;
#endif
        d_step { FENCED(TRAINER); mem[THEAD] = takes };
#ifndef DEAF_ROOM
        if
        :: AT(2, LOAD(TRAINER, W(2))) - takes <= CAP2 / 2 && SEES_SLEEPERS -> hint_last()
        :: else
        fi
#endif
#ifndef NO_SLEEP
    :: else ->
        word = fed;
        d_step { FENCED(TRAINER); sleepers = sleepers + 16 };
#ifdef PLAIN_WAITING
        store(TRAINER, WAITING, 1);
#else
        d_step { FENCED(TRAINER); mem[WAITING] = 1 };
#endif
#ifndef NO_WAIT_HINT
        hint_last();
#endif
#ifndef NO_TRAINER_LOOK
        found = FED(TRAINER, takes);
#endif
#ifdef LATE_FED
        word = fed;
#endif
        if
        :: found -> d_step { word = 0; found = false }
        :: else ->
            d_step { FENCED(TRAINER); trainer_asleep = fed == word; word = 0 };
end_asleep:
            !trainer_asleep
        fi;
        d_step { FENCED(TRAINER); mem[WAITING] = 0 };
        d_step { FENCED(TRAINER); sleepers = sleepers - 16 }
#endif
    od;
    if
    :: true
    :: asked = true;
#ifndef NO_ASK_HINT
        hint_last()
#endif
    fi
}

#if WORKERS > 2
#define ASLEEP (asleep[0] || asleep[1] || asleep[2])
#else
#define ASLEEP (asleep[0] || asleep[1])
#endif
#ifdef HOLES
#define PUT_HOLE (mem[STAMP(1, HOLE)] == 2)
#define MORE(n) ((n) == 1 -> PUT_HOLE - GONE(HD(mem[W(2)])) : 0)
#else
#define MORE(n) 0
#endif
#define RUNS(n)                                                                                    \
    (AC(mem[W(n)]) < LIMIT(n) && READY(0, n, HD(mem[W(n)])) &&                                     \
     (IS_HOLE(0, n, HD(mem[W(n)])) || AT(n, mem[W(n)]) < UNTIL(0, n) + MORE(n)))
#define HIGH (AT(2, mem[W(2)]) - mem[THEAD] > CAP2 / 2)

init {
#if defined PARKED || defined HOLES
    byte i;
#endif
    atomic {
#ifdef PARKED
        sleepers = WORKERS;
        asleep[0] = true;
        asleep[1] = true;
        announced[0] = true;
        announced[1] = true;
#if WORKERS > 2
        asleep[2] = true;
        announced[2] = true;
#endif
        do
        :: i == CAP2 + CAP1 + CAP0 -> break
        :: else ->
            mem[STAMP(0, i)] = 1;
            mem[STAMP(1, i)] = i < CAP2 + CAP1;
            mem[STAMP(2, i)] = i < CAP2;
            i++
        od;
        i = 0;
        mem[W(2)] = CAP2 * 4;
        mem[W(1)] = (CAP2 + CAP1) * 4;
        mem[W(0)] = (CAP2 + CAP1 + CAP0) * 4;
#endif
#ifdef HOLES
        mem[W(0)] = ITEMS * 4;
        do
        :: i == ITEMS -> break
        :: else -> mem[STAMP(0, i)] = 1; i++
        od;
        i = 0;
#endif
#ifdef LAST
        sleepers = WORKERS;
        asleep[0] = true;
        asleep[1] = true;
        announced[0] = true;
        announced[1] = true;
        mem[W(0)] = 5 * 4;
        mem[W(1)] = 5 * 4;
        mem[W(2)] = 4 * 4 + 1;
        mem[STAMP(1, 4)] = 1;
        mem[STAMP(2, 0)] = 1;
        mem[STAMP(2, 2)] = 1;
        mem[STAMP(2, 3)] = 1;
#endif
        run Worker(0);
        run Worker(1);
#if WORKERS > 2
        run Worker(2);
#endif
        run Trainer()
    }
    timeout;
    assert(!(ASLEEP && (RUNS(0) || RUNS(1))));
    assert(!(ASLEEP && RUNS(2) && (trainer_asleep || asked || !HIGH)));
    assert(!(trainer_asleep && FED(0, mem[THEAD])))
}
