/* Marks: how END, EPOCH and FAIL travel from row to row, and what a stop and a rewind do to them:
   spdl__flow_sit and spdl__sink_take of >>flow-impl, spdl__flow_pass of >>mark-impl, spdl__fail of
   >>fail-impl, spdl__pipeline_halt, spdl__pipeline_purge, spdl__rewind_edge,
   spdl__rewind_node and spdl__rewind_all of >>stop-impl.

   Rows 0 (a source), 1 (input order, two calls, result at the ticket of its input + base1) and 2
   (LIM2 calls: 1 is serial, 2 is completion order), and a consumer, whose head is head[3]. Two
   workers, the consumer, which may rewind once at any moment, a thread that may stop at any moment,
   and destroy at the end. Each call succeeds, drops its input, fails, or is cut short by a stop.
   The source may fail, block until a stop, end an epoch (once), or end. A word is {head, act,
   shut}; act is EX while one thread is inside alone. Memory is sequentially consistent: what store
   buffers do to the wake rule is in sit.pml. One lock keeps a stop and a rewind apart; how the code
   does without is in rewind.pml. The run after a rewind has no holes, epochs and failures.

   Checked: each item is delivered or freed once; what is delivered is what lies before the first
   failure in order; the error is that of the mark; END comes only when all was delivered and
   nothing has failed; no call begins behind a mark that ends all, but in the row that fails; no
   call of an epoch begins while one of the epoch before is at work; nothing is put without room;
   one call of .flush for each mark, and none at FAIL; nothing rests without an end, unless the
   source blocks.

     ITEMS, -DEPOCHS, -DSTOPS, -DREWINDS, -DLIM2=2, -DFLUSH, -DCAP2=2
     -DBLOCK    the source may block until a stop; -DHANG: so may a call of row 2
     -DNO_HOLES no call drops its input

   Switches that take out one part of the protocol, and must fail:
     NO_WAIT       a mark is passed while calls are inside
     NO_EXCL       and as an item is taken, not alone
     WAKE_EARLY    who leaves does not look at the consumer
     HEADS_BACK    a rewind lets all tickets begin at 0 again
     OLD_BASE      a rewind leaves the base of row 1
     PURGE_EARLY   a stop waits for the source alone
     OLD_FLUSHED   `flushed` is read before the swap
     TWO_STEPS     the call of .flush and its mark are one pass
     FLUSH_FAIL    there is a call of .flush at FAIL
     SHUT_FIRST    SHUT is a flag beside the word, read before it
     NO_SHUT_PASS  who passes a mark does not shut its row
     FAIL_AT_END   FAIL takes a new ticket, not that of its call
     LAST_PUTS     the last call to leave puts FAIL (completion order) */

#ifndef ITEMS
#define ITEMS 2
#endif
#ifndef LIM2
#define LIM2 1
#endif
#ifndef CAP2
#define CAP2 LIM2
#endif
#define CAP0 2
#define CAP1 2
#define SL 2 /* slots of each ring */
#define EX 7
#define HOLE 20
#define FLUSHED 21
#define MARKS 30
#define EPOCH 30
#define END 31
#define FAIL 32 /* + row */
#define CLOSED 40
#define NOBODY 255

byte head[4]; byte act[3]; bit shut[3];
byte tail[3];      /* rows 0 and 2: next ticket */
byte base1;        /* + 16: ticket of a result of row 1 - that of its input */
byte promised2;    /* completion order: results promised = head[2] - promised2 (base and refunds) */
byte stamp[6]; byte val[6];
bit stopping, waiting, flushed, locked;
byte rec[3];       /* error record of each row: the first item in order */
/* ghosts */
byte where[2 * ITEMS]; /* 0 not made, 1 alive, 2 delivered, 3 freed */
byte fate[2 * ITEMS];  /* 1 dropped, 2 / 3 failed in row 1 / 2 */
bit lap; byte made, epoch_at, next, in_call[2]; byte in_row[2];
bit hung, gone, epochs_seen, flush_seen, src_failed, failed[3], over[3], blocked, quit, flush_due;
byte result;

#define IX(e, t) ((e) * SL + ((t) % SL))
#define READY(e, t) (stamp[IX(e, t)] == (t) + 1)
#define LIMIT(r) ((r) == 0 -> 1 : ((r) == 1 -> 2 : LIM2))
#if LIM2 == 1
#define ROOM2 (tail[2] < head[3] + CAP2)
#else
#define ROOM2 (head[2] + 16 < head[3] + CAP2 + promised2)
#endif
#if LIM2 == 1
#define ROOM2_AT(h) ROOM2
#else
#define ROOM2_AT(h) (h + 16 < head[3] + CAP2 + promised2)
#endif
#define ROOM(r) ((r) == 0 -> tail[0] < head[1] + CAP0 : \
                 ((r) == 1 -> head[1] + base1 < head[2] + CAP1 + 16 : ROOM2))
#define EDGE(r) ((r) == 0 -> 0 : (r) - 1)
#define LOOKS(r) (READY(EDGE(r), head[r]) && ROOM(r) && \
                  (val[IX(EDGE(r), head[r])] >= MARKS -> NOBODY_IN(r) : act[r] < LIMIT(r)))
#ifdef NO_WAIT
#define NOBODY_IN(r) (act[r] < LIMIT(r))
#else
#define NOBODY_IN(r) (act[r] == 0)
#endif
#ifdef NO_WAIT
#define ALONE (a < LIMIT(r))
#else
#define ALONE (a == 0)
#endif
#ifdef SHUT_FIRST
#define OPEN(r) true
#else
#define OPEN(r) (!shut[r])
#endif
#ifdef FLUSH_FAIL
#define FLUSHES(v) true
#else
#define FLUSHES(v) ((v) < FAIL)
#endif
#ifdef TWO_STEPS
#define STILL_FULL false
#else
#define STILL_FULL (!ROOM(r))
#endif
#define HAS(r) (!shut[r] && ((r) == 0 -> (act[0] == 0 && ROOM(0)) : LOOKS(r)))

/* the run after a rewind has neither holes, epochs nor failures: else there are too many states */
#define ANY (lap == 0)
inline free(i) { assert(where[i] == 1); where[i] = 3 }
#define CAP(e) ((e) == 2 -> CAP2 : 2)
inline put_at(e, t, v) {
    assert((t) < head[(e) + 1] + CAP(e)); /* room */
    assert(!READY(e, t));
    val[IX(e, t)] = v;
    stamp[IX(e, t)] = (t) + 1
}
inline put(r, t, v) {
    if
    :: r == 1 -> put_at(1, t + base1 - 16, v)
    :: else -> put_at(r, tail[r], v); tail[r]++
    fi
}
/* a result that is none: no place in row 2, whose results take theirs when put */
inline put_hole(r, t) {
    if
    :: r == 1 -> put_at(1, t + base1 - 16, HOLE)
    :: else -> promised2 = promised2 + (LIM2 > 1 -> 1 : 0)
    fi
}
inline purge(e) {
    d_step {
        t = head[e + 1];
        do
        :: t == head[e + 1] + SL -> break
        :: else ->
            if
            :: READY(e, t) && val[IX(e, t)] < 2 * ITEMS -> free(val[IX(e, t)]); val[IX(e, t)] = HOLE
            :: READY(e, t) && val[IX(e, t)] >= 2 * ITEMS -> val[IX(e, t)] = HOLE
            :: else
            fi;
            t++
        od;
        t = 0
    }
}
#ifdef WAKE_EARLY
#define WAKES false
#else
#define WAKES (waiting && READY(2, head[3]) && !gone)
#endif
inline leave(r, n) {
    d_step {
        act[r] = act[r] - n; in_call[me] = NOBODY; in_row[me] = 3;
        if :: r == 2 && WAKES -> waiting = 0 :: else fi
    }
}
/* a call of this row has failed, or it passes a failure on: nobody enters it or those above */
inline shut_above(r) {
    atomic {
        shut[r] = 1;
        if :: r > 0 -> shut[r - 1] = 1 :: else fi;
        if :: r > 1 -> shut[0] = 1 :: else fi
    }
}
#define OTHER (1 - me)
inline call_begins(r, i) {
    in_call[me] = i; in_row[me] = r;
    assert(!over[r] || (LIMIT(r) > 1 && failed[r])); /* nothing behind a mark that ends all */
    assert(!(i >= epoch_at && in_row[OTHER] == r && in_call[OTHER] < epoch_at)); /* the barrier */
}

proctype Worker(byte me) {
    byte r, h, v, a; bit f;
next_step:
    in_call[me] = NOBODY;
end_idle:
    atomic {
        if
        :: HAS(2) -> r = 2
        :: HAS(1) -> r = 1
        :: HAS(0) -> r = 0
        fi;
#ifndef SHUT_FIRST
        h = head[r]; a = act[r]
#endif
    };
#ifdef SHUT_FIRST
    d_step { h = head[r]; a = act[r] };
#endif
    /* copies what lies there, and looks at it and at the room */
    d_step {
        if
        :: r > 0 && !READY(EDGE(r), h) -> r = 9
        :: r > 0 && READY(EDGE(r), h) -> v = val[IX(EDGE(r), h)]; f = flushed
        :: else
        fi;
        if
        :: r == 9 || (v >= MARKS && !ALONE) || (v < MARKS && a >= LIMIT(r)) -> r = 9
        :: r == 0 && !(tail[0] < head[1] + CAP0) -> r = 9
        :: r == 1 && !(h + base1 < head[2] + CAP1 + 16) -> r = 9
        :: r == 2 && !ROOM2_AT(h) -> r = 9
        :: else
        fi
    };
    if :: r == 9 -> goto again :: else fi;
    /* the compare-and-swap */
    d_step {
        if
        :: head[r] == h && act[r] == a && OPEN(r) ->
            if
#if defined(NO_EXCL) || defined(NO_WAIT)
            :: v >= MARKS -> act[r] = act[r] + 1; head[r] = head[r] + 1
#else
            :: v >= MARKS -> act[r] = EX
#endif
            :: else -> act[r] = act[r] + 1; head[r] = head[r] + 1
            fi
        :: else -> r = 9
        fi
    };
    if :: r == 9 -> goto again :: else fi;
    if
    :: r == 0 -> goto source
    :: r > 0 && v >= MARKS -> goto pass
    :: else
    fi;
    if
    :: v == HOLE -> d_step { put_hole(r, h) } ; goto out
    :: else
    fi;
    d_step { call_begins(r, v) };
#ifdef HANG /* a call of row 2 that ends only with a stop */
    if
    :: r == 2 && !hung -> hung = 1; stopping
    :: true
    fi;
#endif
    if
    :: d_step { true -> put(r, h, v) }                                   /* SPDL_OK */
#ifndef NO_HOLES
    :: d_step { r == 1 && ANY -> free(v); fate[v] = 1; put_hole(r, h) }        /* SPDL_SKIP */
#endif
    :: d_step { stopping && r == 1 -> free(v) }                         /* cut short by a stop */
    :: d_step { ANY -> free(v); fate[v] = 1 + r; failed[r] = 1;         /* fails */
        if :: v < rec[r] -> rec[r] = v :: else fi }
#ifdef FAIL_AT_END
        if
        :: r == 1 -> d_step { put_hole(1, h) };
            d_step { ROOM(1) -> put(1, head[1], FAIL + 1); head[1] = head[1] + 1; over[1] = 1 };
            shut_above(1); goto out
        :: else
        fi;
#endif
#ifdef LAST_PUTS /* as in the proposal: who leaves last puts it */
        if
        :: r == 2 ->
            shut_above(2);
            d_step {
                if
                :: act[2] == 1 -> put(2, h, FAIL + 2); over[2] = 1
                :: else
                fi
            };
            goto out
        :: else
        fi;
#endif
        d_step { put(r, h, FAIL + r); over[r] = 1 };
        shut_above(r)
    fi;
    goto out;
source:
    atomic { in_row[me] = 0; assert(!over[0]) };
    if
    :: d_step { made < ITEMS -> v = lap * ITEMS + made; where[v] = 1; made++; put(0, 0, v) }
#ifdef EPOCHS
    :: d_step { ANY && epoch_at == NOBODY -> epoch_at = lap * ITEMS + made; put(0, 0, EPOCH) }
#endif
    :: d_step { true -> put(0, 0, END); over[0] = 1 }; shut[0] = 1
    :: d_step { ANY -> src_failed = 1; failed[0] = 1; put(0, 0, FAIL); over[0] = 1 }; shut[0] = 1
#ifdef BLOCK
    :: blocked = 1; stopping; blocked = 0
#endif
    fi;
    goto out;
pass:
    skip; /* alone: the head is as it was, and so is what lies there */
#ifdef FLUSH
    if
#ifdef OLD_FLUSHED
    :: r == 2 && !f && FLUSHES(v) ->
#else
    :: r == 2 && !flushed && FLUSHES(v) ->
#endif
        d_step { assert(!flush_due); flush_due = 1; flushed = 1 };
        if
        :: d_step { true -> put(2, 0, FLUSHED) }
        :: true
        :: d_step { ANY -> failed[2] = 1; rec[2] = 100; put(2, 0, FAIL + 2); over[2] = 1 };
            shut_above(2);
            goto out
        fi;
#ifndef TWO_STEPS
        goto out
#endif
    :: else
    fi;
#endif
#if !defined(NO_EXCL) && !defined(NO_WAIT)
    if :: STILL_FULL -> goto out :: else fi; /* another has flushed since we looked */
#endif
    d_step { put(r, h, v); if :: r == 2 -> flushed = 0; flush_due = 0 :: else fi;
        if :: v != EPOCH -> over[r] = 1 :: else fi };
#ifndef NO_SHUT_PASS
    if
    :: v >= FAIL -> shut_above(r)
    :: v == END -> shut[r] = 1
    :: else
    fi;
#endif
#if defined(NO_EXCL) || defined(NO_WAIT)
    goto out;
#else
    d_step {
        head[r] = head[r] + 1; act[r] = 0; in_row[me] = 3;
        if :: r == 2 && WAKES -> waiting = 0 :: else fi
    };
    goto again;
#endif
out:
    atomic { if :: act[r] == EX -> v = EX :: else -> v = 1 fi };
    leave(r, v);
again:
    atomic { r = 0; h = 0; v = 0; a = 0; f = 0; in_row[me] = 3 };
    goto next_step;
}

inline start_again() {
    d_step {
        lap = 1; made = 0; epoch_at = NOBODY; next = ITEMS; epochs_seen = 0; flush_seen = 0;
        src_failed = 0; result = 0;
        failed[0] = 0; failed[1] = 0; failed[2] = 0; over[0] = 0; over[1] = 0; over[2] = 0;
        rec[0] = NOBODY; rec[1] = NOBODY; rec[2] = NOBODY; flushed = 0; flush_due = 0;
#ifdef HEADS_BACK /* all tickets begin at 0 again */
        head[0] = 0; head[1] = 0; head[2] = 0; head[3] = 0; tail[0] = 0; tail[2] = 0;
        base1 = 16; promised2 = 16;
        stamp[0] = 0; stamp[1] = 0; stamp[2] = 0; stamp[3] = 0; stamp[4] = 0; stamp[5] = 0;
#else
        t = head[1] + base1 - 16; /* what row 1 would put next */
        head[1] = tail[0];
#ifndef OLD_BASE
        base1 = t + 16 - head[1];
#endif
        head[2] = t; promised2 = 16 + head[2] - tail[2];
        head[3] = tail[2]; t = 0;
#endif
        skip
    }
}
/* spdl__pipeline_halt: word by word */
inline halt() {
    stopping = 1;
    shut[0] = 1;
    shut[1] = 1;
    shut[2] = 1
}
/* the end of spdl__rewind_all: the source last */
inline open_all() {
    stopping = 0;
    shut[2] = 0;
    shut[1] = 0;
    shut[0] = 0
}
#ifdef PURGE_EARLY
#define QUIET (act[0] == 0)
#else
#define QUIET (act[0] == 0 && act[1] == 0 && act[2] == 0)
#endif

/* what was delivered so far must be all before this place, but dropped ones */
inline reach(i) {
    do
    :: next < (i) && fate[next] == 1 -> next++
    :: else -> break
    od;
    assert(next >= (i))
}

proctype Consumer() {
    byte t, v; bit halted, rewound;
look:
    if
#ifdef REWINDS
    :: !rewound -> rewound = 1; goto rewind
#endif
    :: true
    fi;
wait:
    halted = stopping;
look_again:
    atomic {
        if
        :: !READY(2, head[3]) -> skip
        :: else ->
            v = val[IX(2, head[3])];
            if
            :: v == HOLE -> assert(false) /* row 2 makes none */
            :: v == FLUSHED -> flush_seen = 1; head[3]++; v = 0; waiting = 0; goto wait
            :: v < 2 * ITEMS ->
                d_step {
                    assert(where[v] == 1); where[v] = 2; head[3]++; waiting = 0;
                    assert(!(v >= epoch_at && !epochs_seen) && !(v < epoch_at && epochs_seen));
#if LIM2 == 1
                    reach(v); assert(next == v); next++;
#endif
                    v = 0
                };
                goto look
            :: v == EPOCH ->
                d_step { assert(!epochs_seen); epochs_seen = 1; head[3]++; waiting = 0;
                    flush_seen = 0;
#if LIM2 == 1
                    reach(epoch_at);
#endif
                    v = 0 };
                goto look
            :: v == END || v >= FAIL -> goto ended /* stays in its slot: sticky */
            fi
        fi
    };
    if
    :: halted -> waiting = 0; result = CLOSED; goto ends
    :: else
    fi;
    if
    :: !waiting ->
        waiting = 1; halted = stopping; goto look_again
    :: else
    fi;
end_asleep:
    waiting == 0; goto wait;
ended:
    atomic {
        waiting = 0; result = v;
        assert(v == END || !flush_seen); /* what was gathered does not precede a failure */
        if
        :: v == END -> assert(!failed[0] && !failed[1] && !failed[2]);
            t = lap * ITEMS;
            do
            :: t == lap * ITEMS + made -> break
            :: else -> assert(where[t] == 2 || fate[t] == 1); t++
            od
        :: v == FAIL -> assert(src_failed && !failed[1] && !failed[2])
        :: v == FAIL + 1 -> assert(failed[1] && !failed[2])
        :: v == FAIL + 2 -> assert(failed[2])
        fi;
        t = 0;
#if LIM2 == 1
        if
        :: v == FAIL -> reach(lap * ITEMS + made)
        :: v > FAIL && rec[v - FAIL] < 100 ->
            reach(rec[v - FAIL]);
            assert(next == rec[v - FAIL]);
            assert(fate[next] == 1 + v - FAIL)
        :: else
        fi;
#endif
        v = 0; halted = 0
    };
ends:
    halted = 0;
#ifdef REWINDS
    if
    :: !rewound -> rewound = 1; goto rewind
    :: true
    fi;
#endif
    quit = 1; goto done;
rewind:
    atomic { !locked -> locked = 1 };
    halt();
    QUIET;
    purge(0); purge(1); purge(2);
    start_again();
    open_all();
    locked = 0;
    goto look;
done:
    skip
}
#ifdef STOPS
proctype Stopper() {
    byte t;
end_never:
    if
    :: d_step { !locked -> locked = 1 }
    fi;
    halt();
    waiting = 0;
    QUIET;
    purge(0); purge(1);
    locked = 0
}
#endif
init {
    byte t;
    atomic {
        base1 = 16; promised2 = 16; epoch_at = NOBODY; in_call[0] = NOBODY; in_call[1] = NOBODY;
        in_row[0] = 3; in_row[1] = 3;
        rec[0] = NOBODY; rec[1] = NOBODY; rec[2] = NOBODY;
        run Worker(0); run Worker(1); run Consumer();
#ifdef STOPS
        if
        :: run Stopper()
        :: true
        fi
#endif
    };
    timeout;
    /* at rest: the consumer got an end, or a source blocks and nothing before it is kept */
    if
    :: quit
    :: !quit && hung && !stopping -> assert(!failed[2] && !READY(2, head[3]))
    :: else ->
        assert(blocked && !failed[0] && !failed[1] && !failed[2] && !READY(2, head[3]) && !locked);
        t = lap * ITEMS;
        do
        :: t == lap * ITEMS + made -> break
        :: else -> assert(where[t] == 2 || fate[t] == 1); t++
        od
    fi;
    gone = 1; /* destroy: nobody is in next */
    halt();
    QUIET;
    purge(0); purge(1); purge(2);
    t = 0;
    do
    :: t == 2 * ITEMS -> break
    :: else -> assert(where[t] != 1); t++
    od
}
