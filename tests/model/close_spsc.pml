/* Closing an SPSC ring of >>ring-core and >>ring-impl: a producer that pushes PUSHES times, one or
   BATCH items at once, a consumer that pops until it sees the end, and a thread that closes at
   some moment. Both sides sleep when they have to (spdl__ring_wait); the producer may give up.

   A push publishes tail and then looks whether a thread closes. If so, `final` (`end` in the
   header) decides: the first to set it, producer or consumer, says how many items there are. A push
   that comes too late is refused; tail goes on counting it, and nobody looks there any more.

   Checked: no push that begins after a close has returned is accepted; no item that was refused is
   taken; a consumer that sees the end has taken all that was accepted; when nothing moves any more
   nobody sleeps, and the smaller of tail and `final` counts what was accepted.

   FENCE: light and heavy barriers are both full ones, instead of none and membarrier.
   COMMIT: room is reserved by one call, and filled and committed by another.

   Switches that take out one part of the protocol, and must fail:
     NO_HEAVY        closing does a full barrier of its own instead of a heavy one
     NO_CLOSE_HEAVY  ... only closing, sleepers still do a heavy one
     EARLY_CLOSED    the closed bit is set before the barrier
     NO_END_FIRST    the consumer reads tail before it looks at `final`
     NO_LOSER        a consumer that loses the decision reports the end all the same
     NO_LIMIT        closing leaves `limit` as it is
     LATE_LIMIT      a push that sees the closing leaves `limit` to the thread that closes
     NO_LOOK_AGAIN   the slow path of a push stores `limit` and does not look who closes
     NO_COMMIT_LOOK  (with COMMIT) a commit publishes without looking whether somebody closes
     NO_LAST_LOOK    the consumer does not read tail again once it has seen the closed bit */

#ifndef PUSHES
#define PUSHES 2
#endif
#ifndef CAPACITY
#define CAPACITY 2
#endif
#ifndef BATCH
#define BATCH 1
#endif

#define PROCS 3
#define PRODUCER 0
#define CONSUMER 1
#define CLOSER 2
#define TAIL 0
#define HEAD 1
#define LIMIT 2
#define ADDRESSES 3
#define DEPTH 3
#define STORES_WAIT

/* only ever changed by read-modify-writes */
#define CLOSING 64 /* bits of `not_empty` beside the number of waiters */
#define CLOSED 128
#define UNDECIDED 255
byte not_empty, not_empty_word, not_full, not_full_word;
byte final = UNDECIDED;

bool asleep[2];
byte accepted, taken; /* items */
bool returned;        /* a close has */

#include "tso.pml"

#ifdef FENCE
#define LIGHT(p) FENCED(p)
#else
#define LIGHT(p) true
#endif

inline heavy(p) {
#if defined(NO_HEAVY) || defined(FENCE)
    FENCED(p);
#else
    membarrier(p);
#endif
}

/* FUTEX_WAIT: `word` is what it was */
inline sleep(p, now, may_time_out) {
    d_step { FENCED(p); asleep[p] = now == word; word = 0 };
    if
    :: true ->
end_asleep:
        !asleep[p]
    :: may_time_out -> d_step { timed_out = asleep[p]; asleep[p] = false }
    fi
}

#define GO 0
#define WAIT 1 /* full, empty */
#define OVER 2 /* closed */

/* the quick path, or spdl__spsc_room as spdl__spsc_push_n goes on from it */
inline room() {
    result = GO;
    if
    :: LOAD(PRODUCER, LIMIT) > tail && LOAD(PRODUCER, LIMIT) >= tail + n
    :: else ->
        seen = LOAD(PRODUCER, HEAD) + CAPACITY;
        if
        :: seen >= tail + n -> store(PRODUCER, LIMIT, seen)
        :: else -> result = WAIT
        fi;
        LIGHT(PRODUCER);
#ifndef NO_LOOK_AGAIN
        if
        :: not_empty & CLOSING -> store(PRODUCER, LIMIT, 0); result = OVER
        :: else
        fi;
#endif
        seen = 0
    fi
}

/* spdl__spsc_publish and spdl__spsc_settle: tail, then the decision if somebody closes, then the
   wake */
inline publish() {
#ifdef COMMIT
    late = returned;
#ifndef NO_COMMIT_LOOK
    if
    :: not_empty & CLOSING -> result = OVER; goto published
    :: else
    fi;
#endif
#endif
    store(PRODUCER, TAIL, tail + n);
    LIGHT(PRODUCER);
    seen = not_empty;
    if
    :: seen & CLOSING ->
#ifndef LATE_LIMIT
        store(PRODUCER, LIMIT, 0);
#endif
        d_step { FENCED(PRODUCER); final = (final == UNDECIDED -> tail + n : final) };
        if
        :: final <= tail -> result = OVER
        :: else
        fi
    :: else
    fi;
    if
    :: result == GO ->
        d_step { assert(!late); accepted = accepted + n; tail = tail + n };
        if
        :: seen & ~(CLOSING | CLOSED) ->
            d_step { FENCED(PRODUCER); not_empty_word++ };
            asleep[CONSUMER] = false
        :: else
        fi
    :: else
    fi;
published:
    seen = 0
}

proctype Producer() {
    byte tail, pushes, n, seen, word, result;
    bool timed_out, late;
    do
    :: pushes == PUSHES || result == OVER -> break
    :: else ->
        d_step { pushes++; late = returned };
        if
        :: n = 1
        :: BATCH > 1 -> n = BATCH
        fi;
        room();
        do
        :: result == GO -> publish(); break
        :: result == OVER || timed_out -> break
        :: else -> /* spdl__ring_wait */
            word = not_full_word;
            d_step { FENCED(PRODUCER); not_full++ };
            heavy(PRODUCER);
            room();
            if
            :: result != WAIT -> d_step { FENCED(PRODUCER); not_full--; word = 0 }
            :: else ->
                sleep(PRODUCER, not_full_word, true);
                d_step { FENCED(PRODUCER); not_full-- };
                room()
            fi
        od;
        atomic { n = 0; late = false; timed_out = false; result = (result == WAIT -> GO : result) }
    od
}

#ifdef NO_LAST_LOOK
#define LOOKS !closed
#else
#define LOOKS true
#endif

/* spdl__spsc_look and a pop: `fresh` is the consumer's copy of tail. `final` is looked at before
   tail: once it is decided, tail may count a push that was refused. */
inline pop() {
    result = GO;
    if
    :: head < fresh
    :: else ->
        closed = (not_empty & CLOSED) != 0;
#ifndef NO_END_FIRST
        if
        :: closed && final <= head -> result = OVER
        :: else
        fi;
#endif
        if
        :: result == GO && LOOKS -> fresh = LOAD(CONSUMER, TAIL)
        :: else
        fi;
        if
        :: result == OVER || head < fresh
        :: result == GO && head >= fresh && !closed -> result = WAIT
        :: else ->
            d_step { FENCED(CONSUMER); final = (final == UNDECIDED -> head : final) };
#ifdef NO_LOSER
            result = OVER
#else
            fresh = final; /* this one, or what the producer has decided */
            result = (head < fresh -> GO : OVER)
#endif
        fi;
        closed = false
    fi;
    if
    :: result == GO ->
        d_step { head++; taken++ };
        store(CONSUMER, HEAD, head);
        LIGHT(CONSUMER);
        if
        :: not_full != 0 ->
            d_step { FENCED(CONSUMER); not_full_word++ };
            asleep[PRODUCER] = false
        :: else
        fi
    :: else
    fi
}

proctype Consumer() {
    byte head, fresh, word, result;
    bool timed_out, closed;
    do
    :: true ->
        pop();
        if
        :: result == GO
        :: result == OVER -> break
        :: result == WAIT ->
            word = not_empty_word;
            d_step { FENCED(CONSUMER); not_empty++ };
            heavy(CONSUMER);
            pop();
            if
            :: result != WAIT -> d_step { FENCED(CONSUMER); not_empty--; word = 0 }
            :: else ->
                sleep(CONSUMER, not_empty_word, false);
                d_step { FENCED(CONSUMER); not_empty-- }
            fi;
            if
            :: result == OVER -> break
            :: else
            fi
        fi
    od;
    /* nothing that comes after the end is handed out */
    pop();
    assert(result == OVER)
}

proctype Closer() {
    byte seen;
#ifdef EARLY_CLOSED
    d_step { FENCED(CLOSER); seen = not_empty; not_empty = not_empty | CLOSING | CLOSED };
#else
    d_step { FENCED(CLOSER); not_empty = not_empty | CLOSING };
#endif
#ifdef NO_CLOSE_HEAVY
    FENCED(CLOSER);
#else
    heavy(CLOSER);
#endif
#ifndef NO_LIMIT
    store(CLOSER, LIMIT, 0);
#endif
#ifndef EARLY_CLOSED
    d_step { FENCED(CLOSER); seen = not_empty; not_empty = not_empty | CLOSED };
#endif
    if
    :: seen & ~(CLOSING | CLOSED) -> not_empty_word++; asleep[CONSUMER] = false
    :: else
    fi;
    if
    :: not_full != 0 -> not_full_word++; asleep[PRODUCER] = false
    :: else
    fi;
    d_step { FENCED(CLOSER); returned = true } /* whoever is told sees the limit */
}

init {
    atomic {

        run Producer();
        run Consumer();
        run Closer()
    }
    timeout;
    assert(!asleep[PRODUCER] && !asleep[CONSUMER]);
    assert(taken == accepted && (mem[TAIL] < final -> mem[TAIL] : final) == accepted)
}
