/* Calls that go on later: spdl__parked_returned and spdl__complete of >>defer-impl,
   spdl__parked_drop_all, spdl__flow_again and spdl__flow_park of >>again-impl, spdl__flow_resume of
   >>settle-impl, and spdl__pool_park of >>pool-impl, against stop and destroy.

   One row of LIM calls with ITEMS inputs, in completion order or one call at a time, and a place
   for each call. Two workers that sleep when there is nothing to do, the first of them a guest
   with -DAGAIN, who may go behind any park, and a thread that may stop and destroy at any
   moment. Each operation under the row's lock is one step. Memory is sequentially consistent:
   all that is looked at here follows a lock, a read-modify-write or a full barrier.

     -DAGAIN  each call hands on one result or two, or none at the end; it goes on while there is
              room, maybe, and else waits for whoever comes. A consumer takes ROOMS results.
              There is room for CAP and the calls inside.
     else     each function may defer, then return PENDING or something else. COMPLETERS threads
              complete any call that has been deferred, also one that is over.

   Checked: each call is settled or dropped once, with the result it was completed with; of those
   who complete it one is told that it did; a call that begins finds a free place; nothing is put
   without a slot; once a stop has returned nobody is inside; nobody touches a pipeline that is
   gone; when nothing moves any more no worker sleeps while the row has work, and no stop.

   Switches that take out one part of the protocol, and must fail:
     NO_ROOM_LOOK    who takes up a call that waits does not look for room once it has it
     NO_PARK_HINT    nobody is woken for room that came between the look and the wait
     NO_PARK_QUIET   a call that waits does not tell a stop
     NO_DROP         a stop leaves calls where they wait
     LATE_RELEASE    the place is given back after the call is counted out
     NO_GENERATION   a place that is used again has the same number
     BLIND_RETURN    a function that returns PENDING does not look whether it was completed before
     SILENT_COMPLETE spdl_complete wakes no worker
     SILENT_DONE     and no stop
     LATE_WORD       a stop reads `quiet` behind its look at the row
     NO_COMPLETING   destroy does not wait for those inside spdl_complete */

#ifndef ITEMS
#define ITEMS 2
#endif
#ifndef LIM
#define LIM 1
#endif
#ifndef CAP
#define CAP 1
#endif
#ifndef ROOMS
#define ROOMS 2
#endif
#define COMPLETERS 2
#define NOBODY 255

#define FREE 0
#define RUNNING 1
#define ARMED 2
#define EARLY 3
#define PENDING 4
#define DONE 5
#define WAITING 6

byte state[LIM];
byte call_of[LIM];   /* which call has the place; its generation */
byte result_of[LIM]; /* 1 + who has completed it */
byte head, inside, tail, chead;
bit shut, stopping, stopped, gone;
byte quiet, bell, sleepers, completing;
bool asleep[2], stop_asleep;
bool within[3]; /* the worker is in a step of the pipeline, the consumer in next */
/* of each call */
bool deferred[ITEMS];
byte told[ITEMS], settled[ITEMS];
byte place_of[ITEMS];

#define HAS(s) (state[0] == (s) || (LIM > 1 && state[LIM - 1] == (s)))
#define ROOM (tail < chead + CAP + (LIM == 1 -> 1 : 0))
#ifdef AGAIN
#define GOES_ON (HAS(WAITING) && !shut && ROOM)
#define TAKE_ROOM ROOM
#else
#define GOES_ON HAS(DONE)
#define TAKE_ROOM true
#endif
#define TAKES (!shut && inside < LIM && head < ITEMS && TAKE_ROOM)
#ifdef NO_GENERATION
#define IS(place, call) true
#else
#define IS(place, call) (call_of[place] == call)
#endif
#define RUNNABLE (!stopping && (GOES_ON || TAKES))

inline alive() { assert(!gone) /* freed */ }

/* Behind a read-modify-write or barrier. */
inline hint() {
    d_step {
        alive();
        if
        :: sleepers > 0 && RUNNABLE -> bell++; asleep[0] = false; asleep[1] = false
        :: else
        fi
    }
}
inline wake_quiet() { quiet++; stop_asleep = false }

inline pop(s) {
    at = NOBODY;
    if
    :: state[0] == (s) -> at = 0
    :: state[0] != (s) && LIM > 1 && state[LIM - 1] == (s) -> at = LIM - 1
    :: else
    fi;
    if
    :: at != NOBODY -> state[at] = RUNNING
    :: else
    fi
}
inline settle() { settled[call_of[at]]++; assert(settled[call_of[at]] == 1) }
inline leave_row() {
    assert(inside > 0);
    inside--;
    if
    :: shut && inside == 0 && stopping -> wake_quiet()
    :: else
    fi
}
/* The call is over. */
inline over() {
#ifdef LATE_RELEASE
    d_step { settle(); leave_row() };
    d_step { state[at] = FREE; at = NOBODY; results = 0; resumed = false; h = 0 };
#else
    d_step { settle(); state[at] = FREE };
    d_step { leave_row(); at = NOBODY; results = 0; resumed = false; h = 0 };
#endif
    hint();
    within[me] = false
}
inline put() { assert(tail < chead + CAP + LIM); tail++ } /* there is a slot */

proctype Worker(byte me) {
    byte at = NOBODY, word, h, a, results;
    bool taken, resumed;
look:
    if
    :: atomic { RUNNABLE -> within[me] = true }
    :: else ->
        /* spdl__pool_park */
        atomic { word = bell; sleepers++ };
        atomic {
            if
            :: RUNNABLE
            :: else -> asleep[me] = bell == word
            fi;
            word = 0
        };
end_asleep:
        atomic { !asleep[me] -> sleepers-- };
        goto look
    fi;
    if
    :: GOES_ON ->
#ifdef AGAIN
        d_step { pop(WAITING) };
        if
        :: at == NOBODY -> goto take
#ifndef NO_ROOM_LOOK
        :: at != NOBODY && !ROOM -> goto park
        :: at != NOBODY && ROOM
#else
        :: at != NOBODY
#endif
        fi;
        resumed = true;
        goto call
#else
        d_step { pop(DONE) };
        if
        :: at == NOBODY -> goto take
        :: else -> over(); goto look
        fi
#endif
    :: else
    fi;
take:
    skip;
    atomic {
        if
        :: inside < LIM && head < ITEMS && TAKE_ROOM -> h = head; a = inside
        :: else -> within[me] = false; goto look
        fi
    };
    d_step { /* the swap of the word */
        taken = !shut && head == h && inside == a;
        a = 0;
        if
        :: taken -> head++; inside++
        :: else -> within[me] = false
        fi
    };
    if
    :: atomic { !taken -> h = 0; goto look }
    :: atomic { taken -> taken = false }
    fi;
    hint();
    d_step { pop(FREE); assert(at != NOBODY /* inside: a place */); call_of[at] = h };
call:
    assert(!stopped && !gone); /* inside */
#ifdef AGAIN
    if
    :: atomic { results < 2 -> put(); results++ }; /* SPDL_AGAIN */
        hint();
        if
        :: !shut && ROOM -> goto call
        :: true
        fi;
        goto park
    :: atomic { results < 2 -> put() }; /* SPDL_OK */
        over();
        goto look
    :: resumed || results > 0 -> over(); goto look /* SPDL_SKIP */
    fi;
park:
    skip;
    d_step { state[at] = WAITING; at = NOBODY; results = 0; resumed = false; h = 0 };
#ifndef NO_PARK_HINT
    hint();
#endif
#ifndef NO_PARK_QUIET
    d_step {
        if
        :: stopping -> wake_quiet()
        :: else
        fi
    };
#endif
    within[me] = false;
    if
    :: me == 0 -> goto goes_home /* a guest */
    :: true -> goto look
    fi;
goes_home:
    skip
#else
    if
    :: true -> over(); goto look /* it does not defer */
    :: true
    fi;
    d_step { state[at] = ARMED; place_of[h] = at; deferred[h] = true };
    if
    :: true -> /* returns something else */
        state[at] = RUNNING;
        over();
        goto look
    :: true
    fi;
#ifdef BLIND_RETURN
    d_step { state[at] = PENDING; at = NOBODY; h = 0 };
#else
    d_step {
        if
        :: state[at] == ARMED -> state[at] = PENDING; at = NOBODY; h = 0
        :: else -> assert(state[at] == EARLY); state[at] = RUNNING
        fi
    };
    if
    :: at != NOBODY ->
        assert(told[h] == 1 && result_of[at] != 0 /* result */);
        over()
    :: else -> within[me] = false
    fi;
#endif
    goto look
#endif
}

#ifndef AGAIN
/* Completes any call that has a number, until it is told that it was the one, or gives up. */
proctype Completer(byte me) {
    byte call, place;
    bool found;
end_completer:
    do
    :: deferred[0] -> call = 0; break
    :: ITEMS > 1 && deferred[ITEMS - 1] -> call = ITEMS - 1; break
    od;
    /* the caller knows that a call which nobody has completed is not gone: the pipeline is there */
    atomic {
        if
        :: settled[call] == 0 && !gone -> completing++
        :: else -> goto given_up
        fi
    };
    d_step { /* under the lock */
        alive();
        place = place_of[call];
        found = (state[place] == ARMED || state[place] == PENDING) && IS(place, call);
        if
        :: found ->
            told[call]++;
            assert(told[call] == 1 /* told */);
            assert(call_of[place] == call /* told */);
            result_of[place] = 1 + me;
            state[place] = (state[place] == ARMED -> EARLY : DONE)
        :: else
        fi;
        place = 0
    };
    if
    :: found ->
#ifndef SILENT_COMPLETE
        hint();
#endif
#ifndef SILENT_DONE
        d_step {
            if
            :: stopping -> wake_quiet()
            :: else
            fi
        }
#endif
    :: else
    fi;
    completing--;
given_up:
    skip
}
#else
proctype Consumer() {
    byte taken;
end_takes:
    do
    :: atomic { !stopped && taken < ROOMS && chead < tail -> within[2] = true; chead++; taken++ };
        hint();
        within[2] = false
    od
}
#endif

proctype Stopper() {
    byte at = NOBODY, word;
end_never:
    atomic { true -> stopping = 1 };
    shut = 1;
    do
    :: word = quiet;
#ifndef NO_DROP
        d_step {
            do
            :: pop(WAITING);
                if
                :: at == NOBODY -> pop(DONE)
                :: else
                fi;
                if
                :: at == NOBODY -> break
                :: else -> settle(); state[at] = FREE; leave_row()
                fi
            od
        };
#endif
        if
        :: inside == 0 -> break
        :: else ->
#ifdef LATE_WORD
            word = quiet;
#endif
            d_step { stop_asleep = quiet == word; word = 0 };
end_stop_asleep:
            !stop_asleep
        fi
    od;
    stopped = true;
    !within[0] && !within[1] && !within[2]; /* destroy: the pipeline leaves the pool */
#ifndef NO_COMPLETING
    completing == 0;
#endif
    gone = true
}

init {
    byte i;
    atomic {
        run Worker(0);
        run Worker(1);
#ifdef AGAIN
        run Consumer();
#else
        run Completer(0);
        run Completer(1);
#endif
        if
        :: run Stopper()
        :: true
        fi
    };
    timeout;
    assert(!((asleep[0] || asleep[1]) && RUNNABLE)); /* asleep */
    if
    :: stopping && stop_asleep -> assert(inside > 0 && !HAS(WAITING) && !HAS(DONE)) /* asleep */
    :: else
    fi;
    i = 0;
    do
    :: i == ITEMS -> break
    :: else ->
        assert(told[i] == 0 || settled[i] == 1); /* told */
        assert(i >= head || settled[i] == 1 || HAS(PENDING) || HAS(WAITING)); /* settled */
        i++
    od
}
