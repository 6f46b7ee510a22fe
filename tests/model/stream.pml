/* A stream, the list that a call with SPDL_AGAIN in input order fills while it is read: its call
   (whichever worker has it) adds ITEMS items and closes it, its reader takes them. There are SPACE
   places. Both sleep when there is nothing to do: the reader when the stream is dry; the call,
   which waits in its place then, when it is full.

   What is left out: who sleeps in which pool. A thread that sleeps has announced that, done a full
   barrier, and looked once more; a thread that has changed something does a full barrier and looks
   whether the other one is asleep and has something to do (the wake rule of >>claim-impl).

   Checked: when nothing moves any more, nobody is asleep, every item was taken in order, and the
   reader has passed the stream, which its call does not touch any more.

   Switches that take out one part of the protocol, and must fail:
     NO_CHANGED     a call that adds does not clear `dry`
     NO_DRY_LOOK    a reader that has stored `dry` does not look at the list again
     PLAIN_DRY      no full barrier between that store and that look
     PLAIN_CHANGED  none between an item and the look at `dry`
     COUNT_FIRST    the reader looks at `count` before `open`
     NO_WAIT_FENCE  none after the call has been put in its place
     NO_ROOM_HINT   a take wakes nobody
     EARLY_AT       `at` is stored before the item is read */

#ifndef ITEMS
#define ITEMS 3
#endif
#ifndef SPACE
#define SPACE 1
#endif
#define PROCS 2
#define CALL 0
#define READER 1

#define COUNT 0
#define AT 1
#define CLOSED 2  /* !open */
#define WAITING 3 /* the state of the call's place */
#define ENTRY(i) (4 + (i) % SPACE)
#define ADDRESSES (4 + SPACE)
#define DEPTH 3
#define STORES_WAIT

byte dry;         /* changed by read-modify-writes here: 1 when it is the stream's ticket */
bool dry_waits;   /* the reader's store of `dry` is in its buffer */
bool asleep[2];
bool passed, over;

#include "tso.pml"

#define ROOM(p) (LOAD(p, COUNT) - LOAD(p, AT) < SPACE)

/* The reader's store of `dry`: the only plain one. */
inline dry_store() {
#ifdef PLAIN_DRY
    dry_waits = true
#else
    d_step { FENCED(READER); dry = 1 }
#endif
}

active proctype DryBuffer() {
end:
    do
    :: d_step { dry_waits -> dry = 1; dry_waits = false }
    od
}

/* After a change of the stream: clears `dry`, and wakes the reader. */
inline changed() {
#ifndef PLAIN_CHANGED
    FENCED(CALL);
#endif
#ifndef NO_CHANGED
    if
    :: dry == 1 -> d_step { FENCED(CALL); dry = 0 }
    :: else
    fi;
#endif
    skip
}

inline wake_reader() {
    FENCED(CALL);
    if
    :: asleep[READER] && dry == 0 -> asleep[READER] = false
    :: else
    fi
}

proctype Call() {
    byte i = 0;
    do
    :: i == ITEMS -> break
    :: else ->
        /* spdl__again_take: goes on when there is room */
        do
        :: ROOM(CALL) -> break
        :: else ->
            /* spdl__again_wait, and the worker finds nothing else to do */
            store(CALL, WAITING, 1);
#ifndef NO_WAIT_FENCE
            FENCED(CALL);
#endif
            asleep[CALL] = true;
            if
            :: ROOM(CALL) -> asleep[CALL] = false
            :: else
            fi;
            !asleep[CALL];
            store(CALL, WAITING, 0)
        od;
        store(CALL, ENTRY(i), i + 1);
        store(CALL, COUNT, i + 1);
        i++;
        changed();
        wake_reader()
    od;
    over = true;
    store(CALL, CLOSED, 1); /* from here on it is the reader's */
    changed();
    wake_reader()
}

proctype Reader() {
    byte at = 0, value, count;
    bool closed;
    do
    :: true ->
        /* spdl__stream_look */
#ifdef COUNT_FIRST
        count = LOAD(READER, COUNT);
        closed = LOAD(READER, CLOSED);
#else
        closed = LOAD(READER, CLOSED);
        count = LOAD(READER, COUNT);
#endif
        if
        :: at < count ->
            dry_waits = false;
            dry = 0;
#ifdef EARLY_AT
            d_step { FENCED(READER); mem[AT] = at + 1 };
            value = LOAD(READER, ENTRY(at));
#else
            value = LOAD(READER, ENTRY(at));
            d_step { FENCED(READER); mem[AT] = at + 1 }; /* and the swap of the word */
#endif
            assert(value == at + 1); /* taken: in order */
            at++;
            value = 0;
#ifndef NO_ROOM_HINT
            if
            :: LOAD(READER, WAITING) == 1 -> asleep[CALL] = false
            :: else
            fi;
#endif
            skip
        :: at == count && closed ->
            assert(at == ITEMS && over && !passed); /* all were taken */
            break
        :: else ->
            if
            :: dry == 1 || dry_waits ->
                /* sleeps: announced, a barrier, and a look whether the stream offers something */
                asleep[READER] = true;
                if
                :: dry == 0 && !dry_waits -> asleep[READER] = false
                :: else
                fi;
                !asleep[READER]
            :: else ->
                dry_store();
#ifdef NO_DRY_LOOK
                asleep[READER] = true;
                !asleep[READER]
#endif
            fi
        fi;
        count = 0
    od;
    passed = true
}

init {
    atomic { run Call(); run Reader() }
    timeout;
    assert(passed && over && !asleep[CALL] && !asleep[READER])
}
