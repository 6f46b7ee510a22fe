/* A producer that waits for room: spdl__push_wait and spdl__push_try against the claims of the
   stage behind the feed (spdl__node_claim, spdl__batch_step), against a failure (spdl__node_fail)
   and a stop (spdl__pipeline_halt) of >>flow-impl and >>pipeline-impl.

   One producer pushes ITEMS items into an edge with room for CAPACITY; two workers claim them, one
   at a time under the lock of the stage. A claim may be the last one: the workers may stop taking
   at any moment. Somebody closes the pipeline at some moment, or never. Each sleep of the producer
   may last for ever or end with a timeout, after which it tries once more.

   Checked: when nothing moves any more, the producer does not sleep although there is room, or
   although the pipeline is closed.

   Switches that take out one part of the protocol, and must fail:
     NO_HEAVY      the producer does a full barrier of its own instead of a heavy one
     NO_RECHECK    no second try after prepare
     LATE_WORD     the word is read after the second try
     EARLY_NOTIFY  a claim looks for a waiter before it has made the room
     SILENT_CLOSE  a failure does not look for a producer that waits
   and one that makes the model smaller:
     NO_CLOSE      nobody closes the pipeline */

#ifndef ITEMS
#define ITEMS 3
#endif
#ifndef CAPACITY
#define CAPACITY 1
#endif
#define PROCS 4
#define PRODUCER 2
#define CLOSER 3
#define LOCK 0
#define PUT 1
#define HEAD 2
#define CLOSED 3
#define ADDRESSES 4

/* only ever changed by read-modify-writes */
byte word_now, waiters;

bool asleep;

#include "tso.pml"

/* spdl__event_notify: only a compiler barrier before the look */
inline notify(p) {
    if
    :: waiters == 0
    :: else -> d_step { FENCED(p); word_now++ }; asleep = false
    fi
}

proctype Worker(byte me) {
    bool taken;
    byte at;
    do
    :: true -> break /* takes no more */
    :: LOAD(me, PUT) > LOAD(me, HEAD) ->
        d_step { FENCED(me); taken = mem[LOCK] == 0; mem[LOCK] = 1 };
        if
        :: !taken
        :: else ->
            taken = LOAD(me, PUT) > LOAD(me, HEAD);
#ifdef EARLY_NOTIFY
            notify(me);
#endif
            if
            :: taken -> at = LOAD(me, HEAD) + 1; store(me, HEAD, at); at = 0
            :: else
            fi;
            store(me, LOCK, 0);
#ifndef EARLY_NOTIFY
            if
            :: taken -> notify(me)
            :: else
            fi;
#endif
            taken = false
        fi
    od
}

/* spdl__push_try; the hint after the put is that of park.pml */
inline push_try() {
    if
    :: LOAD(PRODUCER, CLOSED) != 0 -> closed = true
    :: else ->
        if
        :: pushed - LOAD(PRODUCER, HEAD) < CAPACITY ->
            pushed++;
            store(PRODUCER, PUT, pushed);
            got = true
        :: else
        fi
    fi
}

proctype Producer() {
    byte word, pushed;
    bool got, closed, late;
    do
    :: pushed == ITEMS || closed -> break
    :: else ->
        d_step { got = false; late = false };
        push_try(); /* those of the spins are tries like this one */
        do
        :: got || closed || late -> break
        :: else ->
#ifndef LATE_WORD
            word = word_now;
#endif
            d_step { FENCED(PRODUCER); waiters++ };
#ifdef NO_HEAVY
            FENCED(PRODUCER);
#else
            membarrier(PRODUCER);
#endif
#ifndef NO_RECHECK
            push_try();
#endif
            if
            :: got || closed -> d_step { FENCED(PRODUCER); waiters-- }
            :: else ->
#ifdef LATE_WORD
                word = word_now;
#endif
                d_step { FENCED(PRODUCER); asleep = word_now == word; word = 0 };
                if
                :: true ->
end_asleep:
                    !asleep
                :: true -> d_step { late = asleep; asleep = false }
                fi;
                d_step { FENCED(PRODUCER); waiters-- };
                push_try()
            fi
        od;
        if
        :: late && !got && !closed -> break
        :: else
        fi
    od
}

#ifndef NO_CLOSE
proctype Closer() {
    if
    :: true -> skip
    :: true ->
        store(CLOSER, CLOSED, 1);
#ifndef SILENT_CLOSE
        notify(CLOSER)
#endif
    fi
}
#endif

init {
    atomic {
        run Worker(0);
        run Worker(1);
        run Producer();
#ifndef NO_CLOSE
        run Closer()
#endif
    }
    timeout;
    assert(!(asleep && mem[PUT] - mem[HEAD] < CAPACITY));
    assert(!(asleep && mem[CLOSED] != 0))
}
