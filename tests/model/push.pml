/* A producer that waits for room: spdl__push_try and spdl__room_wait of >>next-impl, with
   the hints of >>flow-impl, against the takes of the row behind the feed, a failure or a stop, and
   with drop_oldest: spdl__push_drop_oldest of >>next-impl, spdl__flow_pass of >>mark-impl,
   spdl__pipeline_halt and spdl__pipeline_purge of >>stop-impl.

   One producer pushes ITEMS items into an edge with room for CAPACITY, then a mark, END, for which
   there is always a slot. Two
   workers run the row behind it, concurrency LIM, with the protocol of sit.pml for who sleeps; a
   call may never end. The producer waits as the trainer does: `waiting` by an exchange, counted
   among the sleepers, a second look, sleep on a word of its own; who makes room clears `waiting` by
   a compare-and-swap and wakes it. Somebody closes the pipeline at some moment, or never. With
   -DDROP  the producer never waits: when there is no room it reads the word and the oldest item,
   and takes it by the row's own swap, which needs no place in the row, if the word is not shut; it
   tries again when another one takes meanwhile. Who closes is a stop, which shuts the row, waits
   until no call is inside, and frees what is left
   -DREADY  the producer never waits in push. After a FULL it arms: it counts itself among the
   sleepers, swaps 2 into `waiting`, and looks once more. Then it waits for ready_fn, which adds to
   `room`; or it pushes again before that. It empties its own event before it pushes, as the header
   requires: `word`. Who clears the 2 takes it out of the sleepers, be it a waker, which looks for
   room first, or the producer at its next push (spdl__ready_arm, spdl__ready_end)

   END is passed by a thread that is alone in the row: it says so in the word, shuts the row, and
   leaves, which moves the head.

   Checked: when nothing moves any more, the producer does not sleep although there is room or the
   pipeline is closed, no worker sleeps while the row is runnable or has to finish; each item was
   called, dropped or freed once, in order, and with DROP the producer has pushed all, or is told;
   and with READY it is counted once while it is armed, and not otherwise.

   Switches that take out one part of the protocol, and must fail:
     PLAIN_WAITING  `waiting` is stored, without a full barrier before the second look
     NO_RECHECK     no second try
     LATE_WORD      the word is read behind the second try
     EARLY_HINT     a take looks for a producer before it has made the room
     SILENT_CLOSE   a failure does not look for a producer that waits
     NO_PUSH_FENCE  no full barrier between put and hint
     NO_END_HINT    the end is told to nobody
     UNCOUNTED      (with READY) the producer is not among the sleepers
     KEEPS_COUNT    (with READY) a waker leaves it there
     TAKES_TWICE    (with READY) the next push takes it out, even if a waker has done so
     LATE_COUNT     (with READY) the producer counts itself behind the swap of `waiting`
     PLAIN_DROP     (with DROP) the producer stores the new head
     NEEDS_PLACE    (with DROP) the producer does not pass an item while the row is at its limit
     BLIND_DROP     (with DROP) the producer does not look whether the row is shut */

#ifndef ITEMS
#define ITEMS 3
#endif
#ifndef CAPACITY
#define CAPACITY 1
#endif
#ifndef LIM
#define LIM 2
#endif
#define PROCS 4
#define PRODUCER 2
#define CLOSER 3
#define W 0
#define WAITING 1
#define CLOSED 2
#define STAMP(t) (3 + (t)) /* 0: not there, else ITEM or END */
#define ADDRESSES (4 + ITEMS)
#define ITEM 1
#define END 2
#define HOLE 3

/* only ever changed by read-modify-writes; sleepers: workers, and 16 for the producer */
byte sleepers, bell, room;
bit waking;

bool asleep[2], producer_asleep, pushed_all;
byte pushed, settled; /* the producer's own; items called or dropped */

#define SHUT 8
#define PASSING 3 /* in place of the calls inside: LIM is at most 2 */
#define HD(w) ((w) / 16)
#define AC(w) ((w) & 3)
#define OPEN(w) (((w) & SHUT) == 0)
#define THERE(p, h) (LOAD(p, STAMP(h)) == ITEM)
#define ENDED(p, h) (LOAD(p, STAMP(h)) == END)
#define RUNS(p, w)                                                                                 \
    (OPEN(w) && AC(w) < LIM && (THERE(p, HD(w)) || (AC(w) == 0 && ENDED(p, HD(w)))))

#include "tso.pml"

/* spdl__wake_hint for the row: one worker, if it is runnable and one sleeps */
inline hint_row(p) {
    if
    :: (sleepers & 15) == 0 || waking
    :: else ->
        w2 = LOAD(p, W);
        found = RUNS(p, w2);
        w2 = 0;
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

#define ROOM(p) (pushed - HD(LOAD(p, W)) < CAPACITY)
#ifdef READY
#define ARMED 2
#else
#define ARMED 1
#endif

/* Who closes does not read the sleepers. */
inline wake_producer(p) {
    if
    :: (p == CLOSER || sleepers >= 16) && LOAD(p, WAITING) == ARMED ->
#ifdef READY
        if
        :: !ROOM(p) && LOAD(p, CLOSED) == 0 -> goto no_room
        :: else
        fi;
#endif
        d_step { FENCED(p); found = mem[WAITING] == ARMED; mem[WAITING] = 0 };
        if
        :: found ->
#if defined READY && !defined UNCOUNTED && !defined KEEPS_COUNT
            d_step { assert(sleepers >= 16); sleepers = sleepers - 16 };
#endif
            d_step { room++; found = false; producer_asleep = false }
        :: else
        fi
    :: else
    fi;
no_room:
    skip
}

proctype Worker(byte me) {
    byte word, w1, w2, h;
    bool found, mine, taken;
step:
    mine = false;
take:
    w1 = LOAD(me, W);
    if
    :: OPEN(w1) && (mine || AC(w1) < LIM) && THERE(me, HD(w1)) ->
        h = HD(w1);
#ifdef EARLY_HINT
        wake_producer(me);
#endif
        d_step {
            FENCED(me);
            taken = mem[W] == w1;
            if
            :: taken ->
                mem[W] = w1 + 16 + (mine -> 0 : 1);
                assert(settled == h); /* taken in order, once */
                settled++
            :: else
            fi;
            h = 0;
            w1 = 0
        };
        if
        :: taken ->
            taken = false;
#ifndef EARLY_HINT
            wake_producer(me);
#endif
            if
            :: !mine -> hint_row(me)
            :: else
            fi;
            mine = true;
            if
            :: true
            :: true ->
end_in_call:
                false
            fi;
            goto take
        :: else
        fi
    :: OPEN(w1) && AC(w1) == 0 && ENDED(me, HD(w1)) ->
        d_step {
            FENCED(me);
            taken = mem[W] == w1;
            mem[W] = (taken -> w1 + PASSING : mem[W]);
            w1 = 0
        };
        if
        :: taken ->
            taken = false;
            d_step { FENCED(me); mem[W] = mem[W] | SHUT };
            d_step { FENCED(me); mem[W] = mem[W] + 16 - PASSING }
        :: else
        fi;
        goto step
    :: else -> w1 = 0
    fi;
    if
    :: mine -> d_step { FENCED(me); mem[W] = mem[W] - 1 }; goto step
    :: else
    fi;
    word = bell;
    d_step { FENCED(me); sleepers++ };
    d_step { FENCED(me); waking = 0 };
    w2 = LOAD(me, W);
    found = RUNS(me, w2);
    w2 = 0;
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

/* the last bit of spdl__push_try behind a put or an end */
inline hint_put() {
#ifndef NO_PUSH_FENCE
    FENCED(PRODUCER);
#endif
    hint_row(PRODUCER)
}

inline push_try() {
    if
    :: LOAD(PRODUCER, CLOSED) != 0 -> closed = true
    :: else ->
        if
        :: ROOM(PRODUCER) ->
            store(PRODUCER, STAMP(pushed), ITEM);
            pushed++;
            hint_put();
            got = true
        :: else
        fi
    fi
}

inline arm_count() {
#ifndef UNCOUNTED
    d_step { FENCED(PRODUCER); sleepers = sleepers + 16 }
#else
    skip
#endif
}

inline disarm() {
    d_step { FENCED(PRODUCER); found = mem[WAITING] == 2; mem[WAITING] = 0 };
#ifdef TAKES_TWICE
    found = true;
#endif
    if
#ifndef UNCOUNTED
    :: found -> d_step { assert(sleepers >= 16); sleepers = sleepers - 16; found = false }
#endif
    :: else -> found = false
    fi
}

proctype Producer() {
    byte word, w2;
    bool got, closed, found;
    do
    :: pushed == ITEMS || closed -> break
    :: else ->
        got = false;
#if defined READY && !defined LATE_WORD
        word = room;
#endif
        push_try(); /* those of the pauses are tries like this one */
#ifdef DROP
        if
        :: got || closed
        :: else ->
            word = LOAD(PRODUCER, W);
            if
#ifdef NEEDS_PLACE
            :: OPEN(word) && AC(word) < LIM && THERE(PRODUCER, HD(word)) ->
#elif defined BLIND_DROP
            :: THERE(PRODUCER, HD(word)) ->
#else
            :: OPEN(word) && THERE(PRODUCER, HD(word)) ->
#endif
                d_step {
                    FENCED(PRODUCER);
                    found = mem[W] == word;
#ifdef PLAIN_DROP
                    found = true
#else
                    mem[W] = (found -> word + 16 : mem[W])
#endif
                };
                if
                :: found ->
                    d_step {
                        assert(settled == HD(word)); /* taken in order, once */
                        settled++;
                        found = false
                    };
#ifdef PLAIN_DROP
                    d_step { FENCED(PRODUCER); mem[W] = word + 16 };
#endif
                    word = 0;
                    hint_row(PRODUCER)
                :: else -> word = 0
                fi
            :: else ->
#ifdef NEEDS_PLACE
                if
                :: AC(word) == LIM -> closed = true
                :: else
                fi;
#endif
                word = 0
            fi
        fi
#elif defined READY
        do
        :: got || closed -> break
        :: else ->
#ifndef LATE_COUNT
            arm_count();
#endif
#ifdef PLAIN_WAITING
            store(PRODUCER, WAITING, 2);
#else
            d_step { FENCED(PRODUCER); mem[WAITING] = 2 };
#endif
#ifdef LATE_COUNT
            arm_count();
#endif
            if
#ifndef NO_RECHECK
            :: ROOM(PRODUCER) || LOAD(PRODUCER, CLOSED) != 0
#endif
            :: else ->
#ifdef LATE_WORD
                word = room;
#endif
                d_step { producer_asleep = room == word; word = 0 };
                if
                :: true ->
end_asleep:
                    !producer_asleep
                :: true -> producer_asleep = false /* it pushes by itself */
                fi;
#ifndef LATE_WORD
                word = room
#endif
            fi;
            disarm();
            push_try()
        od;
        word = 0
#else
        do
        :: got || closed -> break
        :: else ->
#ifndef LATE_WORD
            word = room;
#endif
            d_step { FENCED(PRODUCER); sleepers = sleepers + 16 };
#ifdef PLAIN_WAITING
            store(PRODUCER, WAITING, 1);
#else
            d_step { FENCED(PRODUCER); mem[WAITING] = 1 };
#endif
#ifndef NO_RECHECK
            push_try();
#endif
            if
            :: got || closed
            :: else ->
#ifdef LATE_WORD
                word = room;
#endif
                d_step { FENCED(PRODUCER); producer_asleep = room == word; word = 0 };
end_asleep:
                !producer_asleep
            fi;
            d_step { FENCED(PRODUCER); mem[WAITING] = 0; word = 0 };
            d_step { FENCED(PRODUCER); sleepers = sleepers - 16 };
            if
            :: got || closed
            :: else -> push_try()
            fi
        od
#endif
    od;
    pushed_all = pushed == ITEMS;
    store(PRODUCER, STAMP(pushed), END);
#ifndef NO_END_HINT
    hint_put()
#endif
}

#ifndef NO_CLOSE
proctype Closer() {
    byte w2;
    bool found;
#ifdef DROP
    byte t;
#endif
    if
    :: true -> skip
    :: true ->
        store(CLOSER, CLOSED, 1);
        FENCED(CLOSER);
#ifdef DROP
        d_step { FENCED(CLOSER); mem[W] = mem[W] | SHUT };
#endif
#ifndef SILENT_CLOSE
        wake_producer(CLOSER);
#endif
#ifdef DROP
end_in_call:
        AC(mem[W]) == 0;
        /* slot by slot; what a push writes meanwhile is freed by destroy */
        t = HD(mem[W]);
        do
        :: t < ITEMS && LOAD(CLOSER, STAMP(t)) == ITEM ->
            d_step { assert(settled == t); settled++; mem[STAMP(t)] = HOLE; t++ }
        :: else -> break
        od
#endif
        skip
    fi
}
#endif

#define ASLEEP (asleep[0] || asleep[1])

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
    assert(!(producer_asleep && pushed - HD(mem[W]) < CAPACITY));
    assert(!(producer_asleep && mem[CLOSED] != 0));
    assert(!(ASLEEP && RUNS(0, mem[W])));
#if defined READY && !defined UNCOUNTED
    assert(sleepers / 16 == mem[WAITING] / 2)
#endif
#if defined DROP && defined NO_CLOSE
    assert(pushed_all || AC(mem[W]) == 3) /* told: none is left out */
#endif
}
