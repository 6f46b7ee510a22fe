/* A batch on its way from a child to the trainer and its slot on the way back, in memory that they
   share: spdl__child_turn and spdl__child_inherit of >>loader-impl against
   spdl__loader_look, spdl__loader_wait and spdl_loader_done. The child may be killed between any
   two steps, and its stores that wait are seen all the same; the supervisor starts it again, LIVES
   times in all, or says that it is gone.

   The child makes BATCHES, with SLOTS slots of which QUOTA may be ready or held, and 4 entries. The
   trainer gives a batch back when it has taken the next one. Each number in memory is that of the
   batch + 1.

   Checked: the trainer gets each batch once and in order, and its data does not change while it has
   it; when nothing moves any more it has them all, or was told that the child is gone after all
   that was published.

   Switches that take out one part of the protocol, and must fail:
     NO_PUT_FENCE   who publishes looks for a sleeper without a full barrier
     NO_DONE_FENCE  nor does who gives back
     NO_RECHECK     a sleeper does not look again
     LATE_WORD      a sleeper reads the word of the event behind its last look
     EARLY_STAMP    the stamp is stored before the entry
     LATE_HOLD      the word of a slot is stored behind the stamp
     NO_RECOUNT     the next life does not look whether one more was published
     NO_RELEASE     nor takes the slot of a batch back that was not
     GONE_LAST      a trainer looks whether the child is gone behind the stamp
     SILENT_START   no trainer is woken when a child is started again: what the life before had
                    published last is not looked for */

#ifndef BATCHES
#define BATCHES 3
#endif
#ifndef LIVES
#define LIVES 2
#endif
#define SLOTS 2
#define QUOTA 2
#define RING 4
#define DEPTH 3
#define STORES_WAIT
#define PROCS 3
#define STAMP(n) ((n) % RING)
#define ENTRY(n) (RING + (n) % RING)
#define WORD(s) (2 * RING + (s))
#define DATA(s) (2 * RING + SLOTS + (s))
#define PUBLISHED (2 * RING + 2 * SLOTS)
#define PASSED (PUBLISHED + 1)
#define GONE (PUBLISHED + 2)
#define ADDRESSES (PUBLISHED + 3)

/* only ever changed by read-modify-writes, but that a life begins with nobody asleep */
byte filled, filled_waits, emptied, emptied_waits;
bool asleep[2]; /* child, trainer */
bool over, told;
byte deaths, lives, taken; /* lives that are over; those of them that the supervisor knows of */

#include "tso.pml"

inline notify_filled() {
#ifndef NO_PUT_FENCE
    FENCED(0);
#endif
    if
    :: filled_waits > 0 -> d_step { filled++; asleep[1] = false }
    :: else
    fi
}

inline notify_emptied() {
#ifndef NO_DONE_FENCE
    FENCED(1);
#endif
    if
    :: emptied_waits > 0 -> d_step { emptied++; asleep[0] = false }
    :: else
    fi
}

inline reclaim() {
    d_step {
        lent[0] = (lent[0] && LOAD(0, WORD(0)) != 0 -> 1 : 0);
        lent[1] = (lent[1] && LOAD(0, WORD(1)) != 0 -> 1 : 0)
    }
}

#define ROOM (lent[0] + lent[1] < QUOTA && n - LOAD(0, PASSED) + 1 < RING + 1)

proctype Child(byte life) {
    byte n, s, word;
    bit lent[SLOTS];
    {
        n = LOAD(0, PUBLISHED);
#ifndef NO_RECOUNT
        if
        :: n < BATCHES && LOAD(0, STAMP(n)) == n + 1 -> n++; store(0, PUBLISHED, n)
        :: else
        fi;
#endif
        emptied_waits = 0;
        s = 0;
        do
        :: s < SLOTS ->
            if
#ifndef NO_RELEASE
            :: LOAD(0, WORD(s)) > n -> store(0, WORD(s), 0)
#endif
            :: else -> lent[s] = LOAD(0, WORD(s)) != 0
            fi;
            s++
        :: else -> break
        od;
        do
        :: n == BATCHES -> break
        :: n < BATCHES ->
            reclaim();
            if
            :: ROOM ->
                s = (lent[0] -> 1 : 0);
                store(0, DATA(s), 0); /* not all of it yet */
                store(0, DATA(s), n + 1);
#ifdef EARLY_STAMP
                store(0, STAMP(n), n + 1);
#endif
#ifndef LATE_HOLD
                store(0, WORD(s), n + 1);
#endif
                store(0, ENTRY(n), s);
#ifndef EARLY_STAMP
                store(0, STAMP(n), n + 1);
#endif
#ifdef LATE_HOLD
                store(0, WORD(s), n + 1);
#endif
                lent[s] = 1;
                n++;
                store(0, PUBLISHED, n);
                notify_filled()
            :: else ->
#ifndef LATE_WORD
                word = emptied;
#endif
                d_step { FENCED(0); emptied_waits++ };
#ifndef NO_RECHECK
                reclaim();
#endif
#ifdef LATE_WORD
                word = (ROOM -> 255 : emptied);
#endif
                if
                :: !ROOM -> atomic { asleep[0] = word == emptied }; !asleep[0]
                :: else
                fi;
                emptied_waits--
            fi
        od;
        FENCED(0);
        over = true
    } unless { deaths > life }
}

proctype Supervisor() {
    run Child(0);
    do
    :: over -> break
    :: deaths > lives && FENCED(0) -> /* what it has stored is seen */
        lives++;
        asleep[0] = false;
        if
        :: lives == LIVES -> store(2, GONE, 1)
        :: else
        fi;
        FENCED(2);
#ifdef SILENT_START
        if
        :: lives == LIVES -> d_step { filled++; asleep[1] = false }
        :: else
        fi;
#else
        d_step { filled++; asleep[1] = false };
#endif
        if
        :: lives == LIVES -> break
        :: else -> run Child(lives)
        fi
    od
}

proctype Killer() {
    do
    :: atomic { deaths < LIVES && deaths == lives && !over -> deaths++ }
    :: skip -> break
    od
}

proctype Trainer() {
    byte n, s, word, held = 255;
    bit gone, there;
    do
    :: n == BATCHES -> break
    :: n < BATCHES ->
        if
        :: LOAD(1, STAMP(n)) == n + 1 ->
            s = LOAD(1, ENTRY(n));
            assert(LOAD(1, DATA(s)) == n + 1 && taken == n);
            store(1, PASSED, n + 1); /* wakes nobody: the ring has room for more than QUOTA */
            if
            :: held != 255 ->
                assert(LOAD(1, DATA(held)) == n && taken == n);
                store(1, WORD(held), 0);
                notify_emptied()
            :: else
            fi;
            held = s;
            taken++;
            n++
        :: else ->
#ifndef LATE_WORD
            word = filled;
#endif
            d_step { FENCED(1); filled_waits++ };
#ifdef GONE_LAST
            there = LOAD(1, STAMP(n)) == n + 1;
            gone = LOAD(1, GONE);
#else
            gone = LOAD(1, GONE);
            there = LOAD(1, STAMP(n)) == n + 1;
#endif
#ifdef NO_RECHECK
            there = false;
#endif
#ifdef LATE_WORD
            word = filled;
#endif
            if
            :: !there && !gone -> atomic { asleep[1] = word == filled }; !asleep[1]
            :: else
            fi;
            filled_waits--;
            if
            :: gone && !there -> told = true; break
            :: else
            fi;
            there = false
        fi
    od
}

init {
    atomic {
        run Trainer();
        run Supervisor();
        run Killer()
    }
    timeout;
    assert(taken == BATCHES || (told && taken == mem[PUBLISHED]) ||
           (told && taken == mem[PUBLISHED] + 1))
}
