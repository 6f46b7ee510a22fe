/* Held takes: spdl__step_sit and spdl__claim_held of >>claim-impl, beside the plain takes of
   others, with who wakes whom as in sit.pml.

   Row 0 is a source that puts SLOTS slots: items, holes (dropped items), bundles of two entries,
   epoch marks; KINDS tells which, two bits each, or all combinations are searched. Row 1, in input
   order, has concurrency 2. A word is head * 16 + FINISHED + HELD + active. Plain take: one
   compare-and-swap while no flag is set. All else is done HELD: nobody else takes then, and a
   read-modify-write publishes the new head. Output ticket = head + shift; shift is stored while
   HELD, loaded by a plain take between word and compare-and-swap. A reader takes ROOMS results.
   Every call may end or never end, any sitting may end behind any item.

   Checked: each entry is called once; output tickets are dense, and in the order of the inputs, so
   shift and word of a plain take belong together; no call is active while a mark is passed, and
   none begins with the wrong epoch; a row finishes once, behind all its puts; and when nothing
   moves any more, no row is runnable while a worker sleeps, and nobody holds a row.

   Switches that take out one part of the protocol, and must fail:
     NO_OWN_HINT    a release looks at the rows beside, not at its own
     NO_PREV        nobody looks at the row above for the room that was made
     EARLY_SHIFT    shift is loaded before the word
     LATE_SHIFT     shift is stored behind the release
     LAST_PLAIN     the last entry of a bundle is taken plainly
     STALE_FIELDS   a held take uses what it loaded before it held
     STORE_RELEASE  a release stores the word it has worked out
     BLIND_HOLD     a held take does not look whether the row is HELD
     NO_OTHERS      a mark is passed beside the calls of others
     EARLY_FINISH   a row finishes beside the calls of others */

#ifndef SLOTS
#define SLOTS 3
#endif
#ifndef CAP0
#define CAP0 2
#endif
#ifndef CAP1
#define CAP1 2
#endif
#ifndef ROOMS
#define ROOMS 1
#endif
#define TICKETS (2 * SLOTS)
#define PROCS 3
#define READER 2
#define W(n) (n)
#define RHEAD 2
#define SHIFT 3 /* SLOTS more than that */
#define ENTRY 4
#define EPOCH 5
#define END(n) (6 + (n)) /* 1 more than the end; 0 is open */
#define STAMP(t) (8 + (t))
#define OUT(t) (8 + SLOTS + (t))
#define ADDRESSES (8 + 3 * SLOTS)

#define NONE 0
#define ITEM 1
#define HOLE 2
#define BUNDLE 3
#define MARK 4
#define KIND(t) (((kinds >> (2 * (t))) & 3) + 1)
byte kinds;

#define HELD 4
#define FINISHED 8
#define HD(w) ((w) / 16)
#define AC(w) ((w) & 3)
#define FLAGS(w) ((w) & 12)
#define LIMIT(n) ((n) + 1)

/* only ever changed by read-modify-writes */
byte sleepers, bell;
bit waking;
bool asleep[2];

/* what is checked */
byte next_ticket, marks, calls, finished[2];

#define DEPTH 3
#include "tso.pml"

#define ROOM(p, t) ((t) < LOAD(p, RHEAD) + CAP1 + SLOTS) /* t: head + SHIFT */
#define AT(p, h) ((h) < SLOTS -> LOAD(p, STAMP(((h) < SLOTS -> (h) : 0))) : NONE)
#define RUNS_0(p, w)                                                                               \
    (FLAGS(w) == 0 && AC(w) == 0 && (HD(w) == SLOTS || HD(w) < HD(LOAD(p, W(1))) + CAP0))
#define RUNS_1(p, w)                                                                               \
    (FLAGS(w) == 0 && AC(w) < 2 && FITS_1(p, w, 0))
#ifdef NO_OTHERS
#define ALONE(w, mine) true
#else
#define ALONE(w, mine) (AC(w) == (mine))
#endif
#ifdef EARLY_FINISH
#define LAST(w, mine) true
#else
#define LAST(w, mine) (AC(w) == (mine))
#endif
#define FITS_1(p, w, mine)                                                                         \
    (AT(p, HD(w)) == NONE -> LOAD(p, END(0)) == HD(w) + 1 && LAST(w, mine)                         \
     : (AT(p, HD(w)) == HOLE -> true                                                               \
        : ROOM(p, HD(w) + LOAD(p, SHIFT)) && (AT(p, HD(w)) != MARK || ALONE(w, mine))))

inline runnable(p, n) {
    w2 = LOAD(p, W(n));
    if
    :: n == 0 -> found = RUNS_0(p, w2)
    :: else -> found = RUNS_1(p, w2)
    fi;
    w2 = 0
}

/* Behind a read-modify-write; own: row 1, other: row 0 */
inline hint(p, own, other) {
    if
    :: sleepers == 0 || waking
    :: else ->
        if
        :: own -> runnable(p, 1)
        :: else
        fi;
        if
        :: !found && other -> runnable(p, 0)
        :: else
        fi;
        if
        :: found ->
            d_step { found = waking == 0; waking = 1 };
            if
            :: found ->
                d_step {
                    bell++;
                    found = false;
                    if
                    :: asleep[0] -> asleep[0] = false
                    :: else -> asleep[1] = false
                    fi
                }
            :: else
            fi
        :: else
        fi
    fi
}

#ifdef NO_PREV
#define PREV first
#else
#define PREV true
#endif
#ifdef NO_OWN_HINT
#define OWN_HINT first
#else
#define OWN_HINT true
#endif

inline call() {
    if
    :: true
    :: true ->
end_in_call:
        false
    fi
}

/* The release; more: to the head, less: of places. */
inline release(more, less) {
#ifdef STORE_RELEASE
    w1 = (w1 | HELD) - HELD + 16 * (more) - (less);
    d_step { FENCED(me); mem[W(1)] = w1; w1 = 0 }
#else
    d_step { FENCED(me); mem[W(1)] = mem[W(1)] + 16 * (more) - HELD - (less); w1 = 0 }
#endif
}

/* The word is HELD; w1 is what it was, and our place. Sets `ticket` when there is a call. */
inline held() {
#ifndef STALE_FIELDS
    d_step { shift = LOAD(me, SHIFT); entry = LOAD(me, ENTRY) };
#endif
    if
    :: AT(me, HD(w1)) == HOLE ->
#ifdef LATE_SHIFT
        release(1, (first -> 1 : 0));
        shift = shift - 1;
        store(me, SHIFT, shift);
#else
        shift = shift - 1;
        store(me, SHIFT, shift);
        release(1, (first -> 1 : 0));
#endif
        stays = !first
    :: AT(me, HD(w1)) == BUNDLE ->
        if
        :: !ROOM(me, HD(w1) + shift) -> release(0, 1)
        :: else ->
            d_step {
                ticket = HD(w1) + shift - SLOTS;
                epoch = LOAD(me, EPOCH);
                call_now = true;
                assert(ticket == next_ticket); /* taken in order */
                next_ticket++;
                calls++
            };
            if
            :: entry == 0 ->
                store(me, ENTRY, 1);
                shift = shift + 1;
                store(me, SHIFT, shift);
                release(0, 0)
            :: else -> store(me, ENTRY, 0); release(1, 0)
            fi;
            stays = true
        fi
    :: AT(me, HD(w1)) == MARK ->
        if
        :: ROOM(me, HD(w1) + shift) && ALONE(w1, 1) ->
            d_step {
                assert(calls == 0); /* taken from one epoch at a time */
                assert(HD(w1) + shift - SLOTS == next_ticket); /* taken in order */
                next_ticket++;
                marks++
            };
            d_step { ticket = HD(w1) + shift - SLOTS; epoch = LOAD(me, EPOCH) + 1 };
            store(me, OUT(ticket), 1);
            store(me, EPOCH, epoch);
            d_step { ticket = 0; epoch = 0 };
            release(1, (first -> 1 : 0));
            stays = !first
        :: else -> release(0, 1)
        fi
    :: AT(me, HD(w1)) == NONE -> /* the finish */
        ticket = HD(w1) + shift - SLOTS + 1;
        store(me, END(1), ticket);
        d_step {
            FENCED(me);
            finished[1]++;
            assert(finished[1] == 1 && calls == 0 && ticket == next_ticket + 1); /* late */
            ticket = 0;
            mem[W(1)] = mem[W(1)] + FINISHED - HELD - 1;
            w1 = 0
        }
    fi
}

proctype Worker(byte me) {
    byte word, w1, w2, h, shift, entry, ticket, epoch;
    bool found, first, taken, stays, call_now;
step:
    first = true;
take:
    stays = false;
    d_step { call_now = false; taken = false };
#ifdef EARLY_SHIFT
    shift = LOAD(me, SHIFT);
#endif
    w1 = LOAD(me, W(1));
#ifndef EARLY_SHIFT
    shift = LOAD(me, SHIFT);
#endif
#ifdef STALE_FIELDS
    entry = LOAD(me, ENTRY);
#endif
#ifdef LAST_PLAIN
    entry = LOAD(me, ENTRY);
#define PLAIN(w) (AT(me, HD(w)) == ITEM || AT(me, HD(w)) == BUNDLE && entry == 1)
#else
#define PLAIN(w) (AT(me, HD(w)) == ITEM)
#endif
#ifdef BLIND_HOLD
#define FREE(w) (((w) & FINISHED) == 0)
#else
#define FREE(w) (FLAGS(w) == 0)
#endif
    if
    :: FLAGS(w1) == 0 && (!first || AC(w1) < 2) && PLAIN(w1) && ROOM(me, HD(w1) + shift) ->
        d_step {
            FENCED(me);
            taken = mem[W(1)] == w1;
            if
            :: taken ->
                mem[W(1)] = w1 + 16 + (first -> 1 : 0);
                ticket = HD(w1) + shift - SLOTS;
                assert(ticket == next_ticket); /* taken in order */
                next_ticket++;
                calls++;
                call_now = true;
                stays = true
#ifdef LAST_PLAIN
                ;
                mem[ENTRY] = 0
#endif
            :: else
            fi;
            w1 = 0
        };
        if
        :: taken -> epoch = LOAD(me, EPOCH)
        :: else
        fi
    :: FREE(w1) && (!first || AC(w1) < 2) && AT(me, HD(w1)) != ITEM &&
        FITS_1(me, w1, (first -> 0 : 1)) ->
        d_step {
            FENCED(me);
            taken = mem[W(1)] == w1;
            w1 = w1 + (first -> 1 : 0);
            if
            :: taken -> mem[W(1)] = w1 | HELD
            :: else -> w1 = 0
            fi
        };
        if
        :: taken -> held()
        :: else
        fi
    :: else -> w1 = 0
    fi;
    d_step { shift = 0; entry = 0 };
    if
    :: !taken && first -> goto row_0
    :: !taken && !first ->
        /* leave: who does so looks at all rows in its next step */
        d_step { FENCED(me); mem[W(1)] = mem[W(1)] - 1 };
        goto step
    :: taken && !stays -> goto step /* the release has given the place back */
    :: taken && stays -> skip
    fi;
    hint(me, OWN_HINT, PREV);
    first = false;
    if
    :: call_now ->
        assert(epoch == marks); /* taken in its epoch */
        call();
        store(me, OUT(ticket), 1);
        d_step { calls--; ticket = 0; epoch = 0 }
    :: else
    fi;
    if
    :: goto take
    :: d_step { FENCED(me); mem[W(1)] = mem[W(1)] - 1 }; goto step
    fi;
row_0:
    w1 = LOAD(me, W(0));
    if
    :: RUNS_0(me, w1) && HD(w1) < SLOTS ->
        d_step {
            FENCED(me);
            h = HD(w1);
            taken = mem[W(0)] == w1;
            if
            :: taken -> mem[W(0)] = w1 + 17
            :: else -> h = 0
            fi;
            w1 = 0
        };
        if
        :: taken ->
            hint(me, true, true);
            call();
            ticket = KIND(h);
            store(me, STAMP(h), ticket);
            d_step { h = 0; ticket = 0 };
            d_step { FENCED(me); mem[W(0)] = mem[W(0)] - 1 }
        :: else
        fi;
        goto step
    :: RUNS_0(me, w1) && HD(w1) == SLOTS ->
        d_step {
            FENCED(me);
            taken = mem[W(0)] == w1;
            if
            :: taken -> mem[W(0)] = w1 + HELD + 1
            :: else
            fi;
            w1 = 0
        };
        if
        :: taken ->
            store(me, END(0), SLOTS + 1);
            d_step {
                FENCED(me);
                finished[0]++;
                assert(finished[0] == 1); /* late */
                mem[W(0)] = mem[W(0)] + FINISHED - HELD - 1
            }
        :: else
        fi;
        goto step
    :: else -> w1 = 0
    fi;
    /* spdl__pool_park */
    word = bell;
    d_step { FENCED(me); sleepers++ };
    d_step { FENCED(me); waking = 0 };
    runnable(me, 1);
    if
    :: !found -> runnable(me, 0)
    :: else
    fi;
    if
    :: found -> d_step { found = false; word = 0 }
    :: else ->
        d_step { asleep[me] = bell == word; word = 0 }
end_asleep:
        !asleep[me]
    fi;
    d_step { FENCED(me); sleepers-- };
    d_step { FENCED(me); waking = 0 };
    goto step
}

/* Who takes the results: the row behind, or the trainer that asks. */
proctype Reader() {
    byte takes, w2;
    bool found;
end_takes:
    do
    :: takes == ROOMS -> break
    :: takes < ROOMS && LOAD(READER, OUT(takes)) != 0 ->
        takes++;
        d_step { FENCED(READER); mem[RHEAD] = takes };
        hint(READER, true, false)
    od
}

#define ASLEEP (asleep[0] || asleep[1])

init {
    atomic {
#ifdef KINDS
        kinds = KINDS;
#else
        byte i;
        do
        :: i == SLOTS -> break
        :: i < SLOTS -> kinds = kinds * 4; i++
        :: i < SLOTS -> kinds = kinds * 4 + 1; i++
        :: i < SLOTS -> kinds = kinds * 4 + 2; i++
        :: i < SLOTS -> kinds = kinds * 4 + 3; i++
        od;
        i = 0;
#endif
        mem[SHIFT] = SLOTS;
        run Worker(0);
        run Worker(1);
        run Reader()
    }
    timeout;
    assert(!(ASLEEP && (RUNS_0(0, mem[W(0)]) || RUNS_1(0, mem[W(1)]))));
    assert(!(FLAGS(mem[W(0)]) & HELD) && !(FLAGS(mem[W(1)]) & HELD)) /* taken for ever */;
    assert(AC(mem[W(1)]) == calls) /* inside */
}
