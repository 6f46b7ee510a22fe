/* Closing an SPMC ring of >>ring-core and >>ring-impl: a producer that pushes PUSHES times,
   CONSUMERS threads that pop until they are told the end and sleep when they have to
   (spdl__ring_wait), and a thread that closes at some moment. A push that finds the ring full
   gives up.

   The only producer claims a slot with a plain store of tail, then looks whether somebody closes.
   If so, `final` (`end` in the header) decides whether the claim counts: the first to set it, the
   producer or the thread that closes, says how many items there are. A claim that comes too late is
   taken back. Consumers look at stamps, and at `final` once they see the closed bit, never at tail.

   Checked: no push that begins after a close has returned is accepted; no item that was refused is
   taken; nobody is told the end before all that was accepted has been claimed by a pop; when
   nothing moves any more nobody sleeps, and tail counts what was accepted.

   FENCE: light and heavy barriers are both full ones, instead of none and membarrier.

   Switches that take out one part of the protocol, and must fail:
     NO_HEAVY        closing does a full barrier of its own instead of a heavy one
     NO_CLOSE_HEAVY  ... only closing, sleepers still do a heavy one
     EARLY_CLOSED    the closed bit is set before the decision
     NO_RETRACT      a push that came too late leaves its tail where it is
     BLIND           a push that sees the closing does not ask whether its claim counts
     CONSUMER_DECIDES  a consumer that finds tail at its head sets `final`, not who closes */

#ifndef PUSHES
#define PUSHES 1
#endif
#ifndef CONSUMERS
#define CONSUMERS 2
#endif
#ifndef CAPACITY
#define CAPACITY 2
#endif

#define PROCS 4
#define PRODUCER 0
#define CLOSER 3
#define STAMP(at) ((at) % CAPACITY) /* 2 * at: free for that push; one more: filled */
#define TAIL CAPACITY
#define ADDRESSES (CAPACITY + 1)
#define STORES_WAIT

/* only ever changed by read-modify-writes */
#define CLOSING 64 /* bits of `not_empty` beside the number of waiters */
#define CLOSED 128
#define BITS (CLOSING | CLOSED)
#define UNDECIDED 255
byte not_empty, not_empty_word;
byte head, final = UNDECIDED;

bool asleep[PROCS];
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

inline wake_one() {
    if
    :: asleep[1] -> asleep[1] = false
    :: asleep[2] -> asleep[2] = false
    :: else
    fi
}

inline wake_all() { d_step { asleep[1] = false; asleep[2] = false } }

/* spdl__ring_wake of pops, after the look at `not_empty` */
inline notify(p, closing) {
    d_step { FENCED(p); not_empty_word++ };
    if
    :: closing -> wake_all()
    :: else -> atomic { wake_one() }
    fi
}

#define GO 0
#define WAIT 1 /* full, empty */
#define OVER 2 /* closed */

/* spdl__spmc_push_n with spdl__spmc_claim. The look at the closing bit before the claim saves
   claims that would be taken back; without it the model holds as well. */
inline push() {
    store(PRODUCER, TAIL, tail + 1);
    LIGHT(PRODUCER);
    if
    :: not_empty & CLOSING ->
        d_step { FENCED(PRODUCER); final = (final == UNDECIDED -> tail + 1 : final) };
#ifndef BLIND
        if
        :: final <= tail ->
#ifndef NO_RETRACT
            store(PRODUCER, TAIL, tail);
#endif
            break
        :: else
        fi
#endif
    :: else
    fi;
    d_step { assert(!late); accepted++ };
    store(PRODUCER, STAMP(tail), 2 * tail + 1);
    LIGHT(PRODUCER);
    tail++;
    seen = not_empty;
    if
    :: seen & ~BITS -> notify(PRODUCER, seen & CLOSING)
    :: else
    fi;
    seen = 0
}

proctype Producer() {
    byte tail, pushes, seen;
    bool late;
    do
    :: pushes == PUSHES -> break
    :: else ->
        d_step { pushes++; late = returned };
        if
        :: not_empty & CLOSING -> break
        :: else
        fi;
        if
        :: LOAD(PRODUCER, STAMP(tail)) != 2 * tail
        :: else -> push()
        fi
    od
}

/* spdl__mc_pop_n with spdl__ring_ended */
inline pop(p) {
    at = head;
    do
    :: LOAD(p, STAMP(at)) == 2 * at + 1 ->
        atomic { /* the compare-and-swap */
            FENCED(p);
            if
            :: head == at -> head++; taken++; result = GO; break
            :: else -> at = head
            fi
        }
    :: LOAD(p, STAMP(at)) < 2 * at + 1 ->
        result = WAIT;
#ifdef CONSUMER_DECIDES
        if
        :: final <= at -> result = OVER
        :: else ->
            if
            :: not_empty & CLOSED ->
                if
                :: LOAD(p, TAIL) == at ->
                    d_step { FENCED(p); final = (final == UNDECIDED -> at : final) };
                    if
                    :: final == at -> result = OVER
                    :: else
                    fi
                :: else
                fi
            :: else
            fi
        fi;
#else
        if
        :: not_empty & CLOSED -> /* then it is decided */
            if
            :: final <= at -> result = OVER
            :: else
            fi
        :: else
        fi;
#endif
        atomic {
            if
            :: head == at -> break
            :: else -> at = head
            fi
        }
    :: LOAD(p, STAMP(at)) > 2 * at + 1 -> at = head
    od;
    if
    :: result == GO ->
        store(p, STAMP(at), 2 * (at + CAPACITY))
    :: else
    fi;
    at = 0
}

/* spdl__ring_pass_on: is there more? tail is looked at here, but only to wake one too many */
inline pass_on(p) {
    if
    :: LOAD(p, TAIL) > head ->
        LIGHT(p);
        seen = not_empty;
        if
        :: seen & ~BITS -> notify(p, seen & CLOSING)
        :: else
        fi;
        seen = 0
    :: else
    fi
}

proctype Consumer(byte me) {
    byte at, word, seen, result;
    do
    :: result == OVER -> break
    :: else ->
        word = not_empty_word;
        d_step { FENCED(me); not_empty++ };
        heavy(me);
        pop(me);
        if
        :: result != WAIT -> d_step { FENCED(me); not_empty--; word = 0 }
        :: else ->
            d_step { FENCED(me); asleep[me] = not_empty_word == word; word = 0 }; /* FUTEX_WAIT */
end_asleep:
            !asleep[me];
            d_step { FENCED(me); not_empty-- };
            pop(me);
            if
            :: result == GO -> pass_on(me)
            :: else
            fi
        fi
    od;
    assert(taken == accepted)
}

proctype Closer() {
    byte tail, seen;
#ifdef EARLY_CLOSED
    d_step { seen = not_empty; not_empty = not_empty | CLOSING | CLOSED };
#else
    not_empty = not_empty | CLOSING;
#endif
#ifndef NO_CLOSE_HEAVY
    heavy(CLOSER);
#endif
#ifndef CONSUMER_DECIDES
    tail = mem[TAIL];
    final = (final == UNDECIDED -> tail : final);
#endif
#ifndef EARLY_CLOSED
    d_step { seen = not_empty; not_empty = not_empty | CLOSED };
#endif
    if
    :: seen & ~BITS -> not_empty_word++; wake_all()
    :: else
    fi;
    returned = true
}

init {
    atomic {
        mem[1] = 2 * (CAPACITY - 1); /* the stamp of the second slot, or tail */
        run Producer();
        run Consumer(1);
#if CONSUMERS > 1
        run Consumer(2);
#endif
        run Closer()
    }
    timeout;
    assert(!asleep[1] && !asleep[2]);
    assert(taken == accepted && mem[TAIL] == accepted)
}
