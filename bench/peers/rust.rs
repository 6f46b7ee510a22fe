// needs: rustc librust-crossbeam-channel-dev
// flags: bench/peers/rust.sh $source $output.new
//
// Channels of Rust, in a process of their own: reads a line for each run, answers with one.
// The loops are those of flow.h; for the line see far_run in bench_ring.c.
use std::io::{BufRead, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{mpsc, Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

const SHIFT: u32 = 48;
const END: u64 = u64::MAX;

#[derive(Clone, Copy)]
struct Spec {
    kind: u64,
    pinned: bool,
    producers: usize,
    consumers: usize,
    capacity: usize,
    items: u64,
    produce_work: u64,
    consume_work: u64,
    idle_ms: u64,
}

trait Sends: Send + 'static {
    fn put(&self, item: u64);
}
trait Takes: Send + 'static {
    fn take(&self) -> u64;
}
impl Sends for crossbeam_channel::Sender<u64> {
    fn put(&self, item: u64) {
        self.send(item).unwrap()
    }
}
impl Takes for crossbeam_channel::Receiver<u64> {
    fn take(&self) -> u64 {
        self.recv().unwrap()
    }
}
impl Sends for mpsc::SyncSender<u64> {
    fn put(&self, item: u64) {
        self.send(item).unwrap()
    }
}
impl Takes for mpsc::Receiver<u64> {
    fn take(&self) -> u64 {
        self.recv().unwrap()
    }
}

#[repr(C)]
struct Timeval {
    sec: i64,
    usec: i64,
}
#[repr(C)]
struct Rusage {
    user: Timeval,
    system: Timeval,
    rest: [i64; 14],
}
extern "C" {
    fn getrusage(who: i32, usage: *mut Rusage) -> i32;
    fn sched_getaffinity(pid: i32, bytes: usize, mask: *mut u64) -> i32;
    fn sched_setaffinity(pid: i32, bytes: usize, mask: *const u64) -> i32;
}

fn cpu_ns() -> f64 {
    let zero = || Timeval { sec: 0, usec: 0 };
    let mut usage = Rusage { user: zero(), system: zero(), rest: [0; 14] };
    unsafe { getrusage(0, &mut usage) };
    let ns = |t: &Timeval| t.sec as f64 * 1e9 + t.usec as f64 * 1e3;
    ns(&usage.user) + ns(&usage.system)
}

fn pin(cpu: usize) {
    let mut mask = [0u64; 16];
    unsafe { sched_getaffinity(0, 128, mask.as_mut_ptr()) };
    let may: Vec<usize> = (0..1024).filter(|i| mask[i / 64] >> (i % 64) & 1 == 1).collect();
    if let Some(chosen) = may.get(cpu) {
        let mut one = [0u64; 16];
        one[chosen / 64] = 1 << (chosen % 64);
        unsafe { sched_setaffinity(0, 128, one.as_ptr()) };
    }
}

fn work(mut seed: u64, turns: u64) -> u64 {
    seed |= 1;
    for _ in 0..turns {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
    }
    seed
}

/// What the threads of a run share, and what a thread tells when it is done.
struct Shared {
    spec: Spec,
    gate: Barrier,
    left: AtomicU64,
    taken: AtomicU64,
    deadline: Instant,
    done: Mutex<Vec<Done>>,
}
struct Done {
    started: Instant,
    ended: Instant,
    pushed: u64,
    popped: u64,
    pushed_sum: u64,
    popped_sum: u64,
    in_order: bool,
    samples: Vec<f64>,
}

fn produce<S: Sends>(s: &Shared, index: usize, to: S) {
    let spec = &s.spec;
    let base = (index as u64) << SHIFT;
    if spec.pinned {
        pin(index);
    }
    s.gate.wait();
    let started = Instant::now();
    let (mut count, mut sum) = (0, 0);
    match spec.kind {
        2 => loop {
            if Instant::now() >= s.deadline {
                break;
            }
            let number = s.taken.fetch_add(1, Ordering::Relaxed) + 1;
            if number > spec.items || work(number, spec.produce_work) == 0 {
                break;
            }
            count += 1;
            sum += number;
            to.put(base + number);
        },
        3 => {
            for _ in 0..spec.items {
                std::thread::sleep(Duration::from_micros(300));
                to.put(started.elapsed().as_nanos() as u64 + 1);
                count += 1;
            }
        }
        _ => {
            let each = spec.items / spec.producers as u64;
            while count < each && Instant::now() < s.deadline {
                let end = each.min(if spec.producers > 1 { count + 256 } else { each });
                while count < end {
                    count += 1;
                    to.put(base + count);
                }
            }
            sum = count * (count + 1) / 2;
        }
    }
    if s.left.fetch_sub(1, Ordering::AcqRel) == 1 {
        for _ in 0..spec.consumers {
            to.put(END);
        }
    }
    let ended = Instant::now();
    s.done.lock().unwrap().push(Done {
        started,
        ended,
        pushed: count,
        popped: 0,
        pushed_sum: sum,
        popped_sum: 0,
        in_order: true,
        samples: Vec::new(),
    });
}

fn consume<T: Takes>(s: &Shared, index: usize, from: T) {
    let spec = &s.spec;
    if spec.pinned {
        pin(index);
    }
    s.gate.wait();
    let started = Instant::now();
    let (mut count, mut sum, mut in_order) = (0, 0, true);
    let mut last = [0u64; 8];
    let mut samples = Vec::new();
    loop {
        let item = from.take();
        if item == END {
            break;
        }
        count += 1;
        if spec.kind == 3 {
            samples.push((started.elapsed().as_nanos() as u64 + 1).saturating_sub(item) as f64);
            continue;
        }
        let number = item & ((1 << SHIFT) - 1);
        let before = &mut last[(item >> SHIFT) as usize % 8];
        in_order = in_order && number > *before;
        *before = number;
        sum += number;
        if spec.consume_work > 0 && work(item, spec.consume_work) == 0 {
            in_order = false;
        }
    }
    let ended = Instant::now();
    s.done.lock().unwrap().push(Done {
        started,
        ended,
        pushed: 0,
        popped: count,
        pushed_sum: 0,
        popped_sum: sum,
        in_order,
        samples,
    });
}

fn ping<S: Sends, T: Takes>(s: &Shared, index: usize, to: S, from: T) {
    let spec = &s.spec;
    if spec.pinned {
        pin(index);
    }
    s.gate.wait();
    let started = Instant::now();
    let mut wrong = 0;
    let mut count = 0;
    if index == 0 {
        while count < spec.items {
            count += 1;
            to.put(count);
            wrong |= from.take() ^ count;
        }
        to.put(END);
    } else {
        loop {
            let item = from.take();
            if item == END {
                break;
            }
            to.put(item);
            count += 1;
        }
    }
    let ended = Instant::now();
    s.done.lock().unwrap().push(Done {
        started,
        ended,
        pushed: if index == 0 { count } else { 0 },
        popped: if index == 0 { 0 } else { count },
        pushed_sum: 0,
        popped_sum: 0,
        in_order: wrong == 0,
        samples: Vec::new(),
    });
}

/// The ends of a channel: cloned for all threads but the last, which gets the one made.
fn spread<T>(one: T, count: usize, clone: fn(&T) -> Option<T>) -> Vec<T> {
    let mut all = Vec::new();
    for _ in 1..count {
        all.push(clone(&one).expect("a channel with one receiver"));
    }
    all.push(one);
    all
}

/// Answers items, ns, cpu ns, p50 ns and whether all was well.
fn run<S: Sends + Clone, T: Takes>(
    spec: Spec,
    make: fn(usize) -> (S, T),
    clone: fn(&T) -> Option<T>,
) -> String {
    let threads = spec.producers + spec.consumers;
    let shared = Arc::new(Shared {
        spec,
        gate: Barrier::new(if spec.kind == 4 { spec.consumers } else { threads }),
        left: AtomicU64::new(spec.producers as u64),
        taken: AtomicU64::new(0),
        deadline: Instant::now() + Duration::from_millis(240),
        done: Mutex::new(Vec::new()),
    });
    let mut cpu = -cpu_ns();
    let mut handles = Vec::new();
    let (to, from) = make(spec.capacity);
    if spec.kind == 1 {
        let (to_back, from_back) = make(spec.capacity);
        let (a, b) = (shared.clone(), shared.clone());
        handles.push(std::thread::spawn(move || ping(&a, 0, to, from_back)));
        handles.push(std::thread::spawn(move || ping(&b, 1, to_back, from)));
    } else {
        let mut index = spec.producers;
        for end in spread(from, spec.consumers, clone) {
            let s = shared.clone();
            handles.push(std::thread::spawn(move || consume(&s, index, end)));
            index += 1;
        }
        if spec.kind == 4 {
            return idle(&shared, handles, to);
        }
        for (index, end) in spread(to, spec.producers, |s| Some(s.clone())).into_iter().enumerate()
        {
            let s = shared.clone();
            handles.push(std::thread::spawn(move || produce(&s, index, end)));
        }
    }
    for handle in handles {
        handle.join().unwrap();
    }
    cpu += cpu_ns();
    tell(&shared, cpu)
}

fn idle<S: Sends>(s: &Shared, handles: Vec<std::thread::JoinHandle<()>>, to: S) -> String {
    std::thread::sleep(Duration::from_millis(50));
    let start = Instant::now();
    let mut cpu = -cpu_ns();
    std::thread::sleep(Duration::from_millis(s.spec.idle_ms));
    cpu += cpu_ns();
    let ns = start.elapsed().as_nanos();
    for _ in 0..s.spec.consumers {
        to.put(END);
    }
    for handle in handles {
        handle.join().unwrap();
    }
    format!("0 {} {} 0 1", ns, cpu)
}

fn tell(s: &Shared, cpu: f64) -> String {
    let done = s.done.lock().unwrap();
    let first = done.iter().map(|d| d.started).min().unwrap();
    let last = done.iter().map(|d| d.ended).max().unwrap();
    let pushed: u64 = done.iter().map(|d| d.pushed).sum();
    let popped: u64 = done.iter().map(|d| d.popped).sum();
    let pushed_sum: u64 = done.iter().map(|d| d.pushed_sum).sum();
    let popped_sum: u64 = done.iter().map(|d| d.popped_sum).sum();
    let ok = pushed == popped && pushed_sum == popped_sum && done.iter().all(|d| d.in_order);
    let mut samples: Vec<f64> = done.iter().flat_map(|d| d.samples.iter().copied()).collect();
    samples.sort_by(|a, b| a.partial_cmp(b).unwrap());
    let p50 = samples.get(samples.len() / 2).copied().unwrap_or(0.0);
    let ns = last.duration_since(first).as_nanos();
    format!("{} {} {} {} {}", pushed, ns, cpu, p50, ok as u8)
}

fn main() {
    for line in std::io::stdin().lock().lines() {
        let n: Vec<u64> =
            line.unwrap().split_whitespace().map(|word| word.parse().unwrap()).collect();
        let spec = Spec {
            kind: n[1],
            pinned: n[2] != 0,
            producers: n[3] as usize,
            consumers: n[4] as usize,
            capacity: n[5] as usize,
            items: n[6],
            produce_work: n[7],
            consume_work: n[8],
            idle_ms: n[9],
        };
        let answer = match n[0] {
            0 => run(spec, crossbeam_channel::bounded::<u64>, |r| Some(r.clone())),
            _ => run(spec, mpsc::sync_channel::<u64>, |_| None),
        };
        println!("{}", answer);
        std::io::stdout().flush().unwrap();
    }
}
