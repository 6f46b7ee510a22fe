/* A branch and its merge in input order: spdl__put_turn, spdl__put_path, spdl__put_mark and
   spdl__fail of >>rare-impl, spdl__merge_pick and spdl__merge_pass of >>merge-impl.

   Row B, a branch, takes ITEMS items, the second of which may be the end of an epoch, and then
   END, or FAIL of the row above. It routes each item down one of two paths, drops it (a hole in
   path 0), or fails (FAIL down both); for each of these it first writes into the ring of turns.
   In path 0 is row A, of two calls in input order, in path 1 row C, of one call. Their calls
   pass the item, drop it (a hole), or fail. The merge M takes what lies at the head of the path
   whose turn it is. The branch is called while fewer than WAITS results wait beyond what the
   paths hold, one each. The consumer takes when it likes. Two workers do any step that can be
   done. Memory is sequentially consistent; who sleeps is in sit.pml.

   Checked: what the consumer gets is what was not dropped, in order, up to the first failure in
   that order, and the failure is that; END comes when all was taken; the end of an epoch in its
   place, and no call of the next one begins in row A while one of this one is inside; nothing is
   put without a slot; and there is no rest before END or a failure has come.

   Switches that take out one part of the protocol, and must fail:
     NO_HOLE     row A leaves no hole of an input that it drops
     LOST_DROP   the branch writes no turn for an input that it drops
     ANY_PATH    the merge takes from whichever path has something
     BY_NUMBER   a row that fails shuts all rows before it in the table, so the other path, too
     LATE_FAIL   FAIL of a path waits until the other path has a mark
     NO_WAIT     row A passes a mark while a call is inside */

#ifndef ITEMS
#define ITEMS 3
#endif
#ifndef CAPA
#define CAPA 1
#endif
#ifndef WAITS
#define WAITS 1
#endif
#define SLOTS 4
#define TURNS 8
#define HOLE 20
#define EPOCH 29
#define END 30
#define FAIL 31 /* + 0: the row above, 1: B, 2: A, 3: C */
#define NOTHING 99
#define MARK 2  /* a turn */
#define EX 7

/* edges: 0 and 1 in front of A and C, 2 and 3 behind them, 4 the sink */
byte val[5 * SLOTS], stamp[5 * SLOTS], head[5], tail[5];
byte turn[TURNS], turns_put, turns_taken;
byte epoch_at = 255;
byte in, cut; /* of the branch: the next item, and where END or FAIL comes */
bit above_fails;
bit shut[4]; /* B, A, C, M */
byte act[4];
/* ghosts */
byte fate[ITEMS]; /* 1 dropped, 10 + k: row k has failed with it */
byte next, result, old; /* calls of the first epoch in row A */

#define IX(e, t) ((e) * SLOTS + (t) % SLOTS)
#define READY(e) (stamp[IX(e, head[e])] == head[e] + 1)
#define TAG(e) (READY(e) -> val[IX(e, head[e])] : NOTHING)
#define OVER(e) (tail[e] > head[e] + 1 -> tail[e] - head[e] - 1 : 0)
#define B_MAY (!shut[0] && act[0] == 0 && in <= cut && OVER(0) + OVER(1) < WAITS)
#ifdef NO_WAIT
#define ALONE true
#else
#define ALONE (act[1] == 0)
#endif
#define A_ROOM (head[0] < head[2] + CAPA + 2)
#define A_MAY (!shut[1] && A_ROOM && act[1] != EX && READY(0) && \
               (TAG(0) >= MARKS -> ALONE : act[1] < 2))
#define C_MAY (!shut[2] && act[2] == 0 && READY(1) && tail[3] < head[3] + 2)
#define MARKS EPOCH /* what is not less is a mark */
#define OWN_FAIL(e) (TAG(e) == FAIL + (e))
#define IS_MARK(e) (TAG(e) >= MARKS && TAG(e) != NOTHING)
#define COMMON (IS_MARK(2) && IS_MARK(3))
#define HAS_TURN (turns_taken < turns_put)
#define TURN turn[turns_taken % TURNS]
/* whether the merge can take from the path whose edge is e */
#ifdef ANY_PATH
#define M_TAKES(e) (TAG(e) <= HOLE || OWN_FAIL(e))
#elif defined LATE_FAIL
#define M_TAKES(e) (HAS_TURN && TURN == (e) - 2 && READY(e) && (TAG(e) < MARKS || COMMON))
#else
#define M_TAKES(e) (HAS_TURN && TURN == (e) - 2 && READY(e))
#endif
#ifdef ANY_PATH
#define M_MARK (!M_TAKES(2) && !M_TAKES(3) && COMMON)
#else
#define M_MARK (HAS_TURN && TURN == MARK && (COMMON || OWN_FAIL(2) || OWN_FAIL(3)))
#endif
#define M_MAY (!shut[3] && act[3] == 0 && tail[4] < head[4] + 2 && \
               (M_TAKES(2) || M_TAKES(3) || M_MARK))

inline put_at(e, t, v) {
    assert(t < head[e] + SLOTS && stamp[IX(e, t)] != t + 1);
    val[IX(e, t)] = v;
    stamp[IX(e, t)] = t + 1
}
inline put(e, v) { put_at(e, tail[e], v); tail[e]++ }
inline put_turn(t) {
    d_step {
        assert(turns_put < turns_taken + TURNS);
        turn[turns_put % TURNS] = t;
        turns_put++
    }
}
inline put_marks(v) {
    put_turn(MARK);
    d_step { put(0, v) };
    d_step { put(1, v) };
    if
    :: v != EPOCH -> shut[0] = 1
    :: else
    fi
}
/* A row of a path has failed, or it passes the failure of one above. */
inline shut_from(r) {
    d_step {
        shut[r] = 1;
        shut[0] = 1;
#ifdef BY_NUMBER
        shut[1] = 1
#endif
    }
}

proctype Worker() {
    byte v, t;
end_step:
    atomic { v = 0; t = 0 };
end_idle:
    if
    :: atomic { B_MAY -> act[0] = 1; v = in; in++ };
        if
        :: v == cut ->
            v = (above_fails -> FAIL : END);
            put_marks(v)
        :: v < cut && v == epoch_at -> v = EPOCH; put_marks(v)
        :: v < cut && v != epoch_at ->
            if
            :: put_turn(0); d_step { put(0, v) }
            :: put_turn(1); d_step { put(1, v) }
            :: fate[v] = 1;
#ifndef LOST_DROP
                put_turn(0);
#endif
                d_step { put(0, HOLE) }
            :: fate[v] = 11; v = FAIL + 1; put_marks(v)
            fi
        fi;
        act[0] = 0
    :: atomic { A_MAY && TAG(0) < MARKS ->
        v = TAG(0);
        t = head[0];
        head[0]++;
        act[1]++;
        assert(old == 0 || v < epoch_at || v == HOLE); /* inside: the barrier */
        old = old + (v < epoch_at) };
        if
        :: v == HOLE -> d_step { put_at(2, t, HOLE) }
        :: v != HOLE -> d_step { put_at(2, t, v) }
        :: v != HOLE -> fate[v] = 1;
#ifndef NO_HOLE
            d_step { put_at(2, t, HOLE) }
#endif
        :: v != HOLE -> fate[v] = 12; d_step { put_at(2, t, FAIL + 2) }; shut_from(1)
        fi;
        d_step { act[1]--; old = old - (v < epoch_at) }
    :: atomic { A_MAY && TAG(0) >= MARKS && act[1] == 0 -> v = TAG(0); act[1] = EX };
        d_step { put_at(2, head[0], v) };
        if
        :: v >= FAIL -> shut_from(1)
        :: v == END -> shut[1] = 1
        :: else
        fi;
        d_step { head[0]++; act[1] = 0 }
#ifdef NO_WAIT
    :: atomic { A_MAY && TAG(0) >= MARKS && act[1] > 0 -> v = TAG(0); put_at(2, head[0], v);
        head[0]++; shut[1] = v != EPOCH }
#endif
    :: atomic { C_MAY -> v = TAG(1); head[1]++; act[2] = 1 };
        if
        :: v >= HOLE -> d_step { put(3, v) };
            if
            :: v >= FAIL -> shut_from(2)
            :: v == END -> shut[2] = 1
            :: else
            fi
        :: v < HOLE -> d_step { put(3, v) }
        :: v < HOLE -> fate[v] = 1; d_step { put(3, HOLE) }
        :: v < HOLE -> fate[v] = 13; d_step { put(3, FAIL + 3) }; shut_from(2)
        fi;
        act[2] = 0
    :: atomic { M_MAY -> act[3] = 1 };
        atomic {
            if
            :: M_TAKES(2) -> v = TAG(2); head[2]++
            :: M_TAKES(3) -> v = TAG(3); head[3]++
            :: M_MARK && OWN_FAIL(2) -> v = TAG(2); head[2]++
            :: M_MARK && OWN_FAIL(3) -> v = TAG(3); head[3]++
            :: M_MARK && !OWN_FAIL(2) && !OWN_FAIL(3) ->
                v = (IS_MARK(2) -> TAG(2) : TAG(3));
                head[2]++;
                head[3]++
            fi
        };
        d_step {
            if
            :: v != HOLE -> put(4, v)
            :: else
            fi;
            turns_taken++;
            if
            :: v >= END -> shut[3] = 1 /* not EPOCH */
            :: else
            fi
        };
        act[3] = 0
    fi;
    goto end_step
}

inline skip_dropped() {
    do
    :: next < cut && fate[next] == 1 -> next++
    :: else -> break
    od
}

proctype Consumer() {
    byte v;
end_takes:
    do
    :: atomic { READY(4) -> v = TAG(4);
        skip_dropped();
        if
        :: v < HOLE -> assert(v == next); next++; head[4]++
        :: v == EPOCH -> assert(next == epoch_at); next++; head[4]++
        :: v == END -> assert(!above_fails && next == cut); break
        :: v == FAIL -> assert(above_fails && next == cut); break
        :: v > FAIL -> assert(next < cut && fate[next] == v - FAIL + 10); break
        fi;
        v = 0 }
    od;
    result = v
}

init {
    atomic {
        if
        :: cut = ITEMS
        :: above_fails = 1; cut = ITEMS
        fi;
        if
        :: epoch_at = 1
        :: true
        fi;
        run Worker();
        run Worker();
        run Consumer()
    };
    timeout;
    assert(result != 0)
}
