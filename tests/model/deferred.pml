/* Deferred calls: spdl_defer, spdl__deferred_returned, spdl__complete and spdl__deferred_release of
   >>defer-impl, and the end of spdl_pipeline_destroy.

   One place of a stage with concurrency 1, used by CALLS calls one after the other. Each function
   defers, and returns PENDING or something else. COMPLETERS threads complete any call that has been
   deferred, also one that is over. When all calls are over somebody destroys the pipeline.

   Checked: each call is settled once, with the result it was completed with; of all those who
   complete it one is told that it did, and none is who comes too late; nobody touches a pipeline
   that is gone, or a place that was given to another call; and nothing waits for ever.

   Switches that take out one part of the protocol, and must fail:
     NO_GENERATION  a place that is used again has the same handle
     NO_TELLING     who completes says so before the result is written
     BLIND_RETURN   a function that returns PENDING does not look whether it was completed before
     NO_COMPLETING  destroy does not wait for those inside spdl_complete
     LATE_RELEASE   the place is given back after the call is counted out */

#ifndef CALLS
#define CALLS 2
#endif
#define COMPLETERS 2
#define PROCS 3
#define WORKER 2
#define STATE 0
#define RESULT 1
#define ADDRESSES 2

#define FREE 0
#define ARMED 1
#define WAITING 2
#define TELLING 3
#define DONE 4
#define SETTLING 5
#define IS(g, s) ((g) * 8 + (s))
#ifdef NO_GENERATION
#define NEXT(g) 0
#define OF(call) 0
#else
#define NEXT(g) ((g) + 1)
#define OF(call) (call)
#endif

/* only ever changed by read-modify-writes */
byte active_calls, completing;

byte deferred;         /* calls that have a handle */
byte settled[CALLS];
byte told[CALLS];      /* completions that were told that they were the one */
bool returned[CALLS];   /* its function has returned PENDING */
bool gone;
bool place_taken;

#include "tso.pml"

/* A read-modify-write, or a store that is followed by one: it needs no buffer. */
inline compare_and_swap(p, from, to) {
    d_step {
        FENCED(p);
        swapped = mem[STATE] == from;
        mem[STATE] = (swapped -> to : mem[STATE])
    }
}

/* spdl__deferred_release: the place goes back to the list under a spin lock, which is a
   read-modify-write */
inline release(p, g) {
    to = IS(NEXT(g), FREE);
    store(p, STATE, to);
    d_step { FENCED(p); assert(place_taken); place_taken = false }
}

inline settle(p, call) {
    d_step { settled[call]++; assert(settled[call] == 1) }
}

proctype Worker() {
    byte call, to;
    bool swapped, waits;
    do
    :: call == CALLS -> break
    :: else ->
end_one_call:
        active_calls == 0; /* the bound of the concurrency */
        d_step { active_calls++; assert(!place_taken); place_taken = true };
        to = IS(OF(call), ARMED);
        store(WORKER, STATE, to);
        d_step { FENCED(WORKER); deferred++ }; /* the handle goes to others by means of its own */
        if
        :: waits = true
        :: waits = false
        fi;
        returned[call] = waits;
#ifdef BLIND_RETURN
        to = IS(OF(call), (waits -> WAITING : FREE));
        store(WORKER, STATE, to);
        swapped = true;
        FENCED(WORKER);
#else
        compare_and_swap(WORKER, IS(OF(call), ARMED), IS(OF(call), (waits -> WAITING : FREE)));
#endif
        if
        :: swapped && waits -> skip /* spdl_complete settles it */
        :: else ->
            if
            :: swapped
            :: else ->
                mem[STATE] == IS(OF(call), DONE); /* spdl__deferred_returned */
                assert(!waits || LOAD(WORKER, RESULT) == call + 1)
            fi;
            release(WORKER, OF(call));
            settle(WORKER, call);
            d_step { FENCED(WORKER); active_calls-- }
        fi;
        d_step { FENCED(WORKER); call++; to = 0; swapped = false; waits = false }
    od
}

/* spdl__complete */
proctype Completer(byte me) {
    byte call, was, to;
    bool swapped;
end_idle:
    if
    :: deferred > 0 -> call = 0
    :: deferred > 1 -> call = 1
    fi;
    /* as long as the pipeline is there: whoever comes late with a dead handle has to know */
    d_step { FENCED(me); swapped = gone; completing = completing + !gone };
    if
    :: swapped -> goto over
    :: else
    fi;
    /* spdl__deferred_claim */
    was = ARMED;
#ifdef NO_TELLING
    compare_and_swap(me, IS(OF(call), ARMED), IS(OF(call), DONE));
#else
    compare_and_swap(me, IS(OF(call), ARMED), IS(OF(call), TELLING));
#endif
    if
    :: swapped
    :: else ->
        was = WAITING;
        compare_and_swap(me, IS(OF(call), WAITING), IS(OF(call), SETTLING))
    fi;
    if
    :: !swapped -> skip
    :: else ->
        d_step { told[call]++; assert(told[call] == 1) };
        assert(!gone);
        store(me, RESULT, call + 1);
        if
        :: was == ARMED ->
#ifndef NO_TELLING
            to = IS(OF(call), DONE);
            store(me, STATE, to)
#endif
        :: else ->
            assert(place_taken && LOAD(me, RESULT) == call + 1);
            settle(me, call);
#ifndef LATE_RELEASE
            release(me, OF(call));
#endif
            d_step { FENCED(me); active_calls-- };
#ifdef LATE_RELEASE
            release(me, OF(call));
#endif
            assert(!gone) /* spdl__wake_all */
        fi
    fi;
    assert(!gone);
    d_step { FENCED(me); completing-- };
over:
    atomic { FENCED(me); call = 0; was = 0; to = 0; swapped = false }
}

/* After a stop: no call begins any more, so the last one is the end. */
proctype Destroyer() {
end_running:
    settled[CALLS - 1] == 1 && active_calls == 0;
    /* nobody begins a completion between this look and the end: all calls are over */
    atomic {
#ifndef NO_COMPLETING
        completing == 0; /* must come true */
#endif
        gone = true
    }
}

init {
    atomic {
        run Completer(0);
        run Completer(1);
        run Worker();
        run Destroyer()
    }
    timeout;
    /* what was completed is settled; what nobody has completed still waits */
    assert(told[0] == 0 || settled[0] == 1);
    assert(told[1] == 0 || settled[1] == 1);
    assert(settled[0] == 1 || returned[0]);
    assert(deferred < 2 || settled[1] == 1 || returned[1]);
    assert(completing == 0)
}
