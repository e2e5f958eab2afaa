//! A spin-then-park worker pool: cheap enough to be called for every matrix of a token.
//!
//! [`Pool::run`] opens a job of numbered tasks. The caller and the workers that happen to be awake take the next
//! number from one counter until none is left (dynamic partition, so a core that others disturb takes less). The
//! caller waits only for workers that entered the job: one that is still asleep never holds it up. A worker without
//! work spins for [`SPIN`] and then sleeps; an idle pool uses no processor time.
//!
//! Tasks that panic end the job with [`PoolError::Panicked`]. A task that calls [`Pool::run`] itself has the inner
//! tasks run on its own thread, so nesting can neither deadlock nor use more threads than the pool has.

use std::cell::{Cell, UnsafeCell};
use std::collections::HashSet;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// The most threads a pool may have.
pub const MAX_THREADS: usize = 64;

/// How long a worker looks for the next job before it sleeps; longer than the gaps between the operations of one
/// token, shorter than anything a user could notice as load.
pub const SPIN: Duration = Duration::from_micros(100);

/// Why a job did not complete, or a pool could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// The number of threads is out of range.
    #[error("the number of threads must be from 1 to {MAX_THREADS}, but is {asked}")]
    ThreadCount {
        /// What was asked for.
        asked: usize,
    },
    /// The system refused a thread.
    #[error("cannot start worker thread {index}: {reason}; ask for fewer threads")]
    Spawn {
        /// Which worker, from 1.
        index: usize,
        /// What the system said.
        reason: String,
    },
    /// A task panicked. Some of the other tasks did not run.
    #[error("a kernel failed: {message}")]
    Panicked {
        /// What the panic said.
        message: String,
    },
}

/// The tasks of one job; lives on the stack of [`Pool::run`].
struct Job<'a> {
    work: &'a (dyn Fn(usize) + Sync),
    tasks: usize,
    next: AtomicUsize,
    panic: Mutex<Option<String>>,
}

impl Job<'_> {
    /// Takes tasks until none is left. Never unwinds.
    fn take_part(&self) {
        let nested = IN_TASK.replace(true);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let task = self.next.fetch_add(1, Ordering::Relaxed);
                if task >= self.tasks {
                    break;
                }
                (self.work)(task);
            }
        }));
        IN_TASK.set(nested);
        if let Err(payload) = outcome {
            let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
            // The payload's own destructor could panic again.
            std::mem::forget(payload);
            self.next.store(self.tasks, Ordering::Relaxed);
            lock(&self.panic).get_or_insert(text.unwrap_or_else(|| "panic without a message".to_owned()));
        }
    }
}

thread_local! {
    /// Whether this thread is inside a task of some pool.
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

/// A mutex of ours guards no invariant that a panic could break.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The gate word: which job is current, whether workers may enter it, for how many there is room, and how many are
/// inside. All in one word, so that entering is one compare-and-swap.
mod gate {
    pub(super) const INSIDE: u64 = 1;
    pub(super) const INSIDE_MASK: u64 = 0xffff;
    pub(super) const SEAT: u64 = 1 << 16;
    pub(super) const SEAT_MASK: u64 = 0xffff << 16;
    pub(super) const EPOCH_SHIFT: u32 = 32;

    pub(super) fn epoch(word: u64) -> u64 {
        word >> EPOCH_SHIFT
    }

    pub(super) fn has_seat(word: u64) -> bool {
        word & SEAT_MASK != 0
    }

    /// The next job's word: nobody inside, room for `seats` workers.
    pub(super) fn open(word: u64, seats: usize) -> u64 {
        (epoch(word).wrapping_add(1) << EPOCH_SHIFT) | (seats as u64 * SEAT)
    }
}

/// Keeps what different threads write on different cache lines.
#[repr(align(128))]
struct Padded<T>(T);

struct Shared {
    gate: Padded<AtomicU64>,
    /// The current job. Written only while no seat is free and nobody is inside.
    job: UnsafeCell<*const Job<'static>>,
    closing: AtomicBool,
    parked: Vec<Padded<AtomicBool>>,
}

// SAFETY: `job` is written by the holder of `Pool::turn` while the gate lets nobody in, and read only by workers
// that entered through the gate, whose compare-and-swap acquires what opening it released.
unsafe impl Sync for Shared {}
// SAFETY: the pointer is to a `Job`, all of whose parts may be used from any thread.
unsafe impl Send for Shared {}

impl Shared {
    /// Enters the current job if it is not the one last seen and has room.
    fn enter(&self, seen: &mut u64) -> bool {
        let mut word = self.gate.0.load(Ordering::SeqCst);
        while gate::epoch(word) != *seen && gate::has_seat(word) {
            let entered = word - gate::SEAT + gate::INSIDE;
            match self.gate.0.compare_exchange_weak(word, entered, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(_) => {
                    *seen = gate::epoch(word);
                    return true;
                }
                Err(now) => word = now,
            }
        }
        false
    }

    fn worker(&self, index: usize) {
        // No job has the number of the initial gate word.
        let mut seen = 0;
        let mut idle_since = Instant::now();
        let mut turns = 0u32;
        while !self.closing.load(Ordering::SeqCst) {
            if self.enter(&mut seen) {
                // SAFETY: inside the gate the pointer is valid: the caller waits for us to leave.
                unsafe { &**self.job.get() }.take_part();
                self.gate.0.fetch_sub(gate::INSIDE, Ordering::SeqCst);
                idle_since = Instant::now();
                turns = 0;
                continue;
            }
            turns = turns.wrapping_add(1);
            if !turns.is_multiple_of(32) || idle_since.elapsed() < SPIN {
                std::hint::spin_loop();
                continue;
            }
            let parked = &self.parked[index].0;
            parked.store(true, Ordering::SeqCst);
            // Whoever opens the gate after this line sees the flag; whoever did before it is seen here.
            let word = self.gate.0.load(Ordering::SeqCst);
            let missed = gate::epoch(word) != seen && gate::has_seat(word);
            if !missed && !self.closing.load(Ordering::SeqCst) {
                std::thread::park();
            }
            parked.store(false, Ordering::SeqCst);
            idle_since = Instant::now();
        }
    }

    /// Shuts the gate and waits until nobody is inside.
    fn close(&self) {
        self.gate.0.fetch_and(!gate::SEAT_MASK, Ordering::SeqCst);
        let mut turns = 0u32;
        while self.gate.0.load(Ordering::SeqCst) & gate::INSIDE_MASK != 0 {
            turns = turns.saturating_add(1);
            if turns < 2000 {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }
}

/// Worker threads and the thread that calls [`run`](Pool::run). Jobs from several threads take turns.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    sleepers: Vec<Thread>,
    turn: Mutex<()>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).finish()
    }
}

impl Pool {
    /// A pool of `threads` threads, 1 to [`MAX_THREADS`], the caller of [`run`](Self::run) being one of them.
    ///
    /// # Errors
    /// When the number is out of range or the system refuses a thread.
    pub fn new(threads: usize) -> Result<Self, PoolError> {
        if !(1..=MAX_THREADS).contains(&threads) {
            return Err(PoolError::ThreadCount { asked: threads });
        }
        let shared = Arc::new(Shared {
            gate: Padded(AtomicU64::new(0)),
            job: UnsafeCell::new(std::ptr::null()),
            closing: AtomicBool::new(false),
            parked: (1..threads).map(|_| Padded(AtomicBool::new(false))).collect(),
        });
        let mut pool = Self { shared, workers: Vec::new(), sleepers: Vec::new(), turn: Mutex::new(()) };
        for index in 0..threads - 1 {
            let shared = Arc::clone(&pool.shared);
            let worker = std::thread::Builder::new()
                .name(format!("mlx-bun-cpu-{}", index + 1))
                .spawn(move || shared.worker(index))
                .map_err(|error| PoolError::Spawn { index: index + 1, reason: error.to_string() })?;
            pool.sleepers.push(worker.thread().clone());
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// How many threads take part in a job, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `work` once for each number below `tasks`, on up to [`threads`](Self::threads) threads, and returns when
    /// all calls have returned. Which thread runs which number is not determined, nor is the order.
    ///
    /// # Errors
    /// [`PoolError::Panicked`] when a call panicked; then some numbers may not have been called. The pool stays
    /// usable.
    pub fn run(&self, tasks: usize, work: &(dyn Fn(usize) + Sync)) -> Result<(), PoolError> {
        let job = Job { work, tasks, next: AtomicUsize::new(0), panic: Mutex::new(None) };
        let seats = tasks.min(self.threads()).saturating_sub(1);
        if seats == 0 || IN_TASK.get() {
            job.take_part();
        } else {
            let _turn = lock(&self.turn);
            self.open(&job, seats);
            job.take_part();
            self.shared.close();
        }
        match job.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(message) => Err(PoolError::Panicked { message }),
            None => Ok(()),
        }
    }

    /// Lets `seats` workers into the job. Nothing between this and [`Shared::close`] may unwind.
    fn open(&self, job: &Job<'_>, seats: usize) {
        let shared = &*self.shared;
        // SAFETY: the gate is shut, nobody is inside, and we hold the turn, so nobody reads the cell. The job
        // outlives its use because `close` waits for everybody who entered.
        unsafe { *shared.job.get() = std::ptr::from_ref(job).cast() };
        let word = shared.gate.0.load(Ordering::SeqCst);
        shared.gate.0.store(gate::open(word, seats), Ordering::SeqCst);
        let mut wanted = seats;
        for (parked, sleeper) in shared.parked.iter().zip(&self.sleepers) {
            if wanted == 0 {
                break;
            }
            if parked.0.load(Ordering::SeqCst) {
                sleeper.unpark();
            }
            wanted -= 1;
        }
    }

    /// [`run`](Self::run) over the ranges that `0..total` falls into when cut every `chunk` (at least 1).
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_ranges(
        &self,
        total: usize,
        chunk: usize,
        work: &(dyn Fn(Range<usize>) + Sync),
    ) -> Result<(), PoolError> {
        let chunk = chunk.max(1);
        self.run(total.div_ceil(chunk), &|task| {
            let start = task * chunk;
            work(start..total.min(start + chunk));
        })
    }

    /// [`run`](Self::run) over the pieces that `data` falls into when cut every `chunk` (at least 1) elements: the
    /// piece's number and the piece.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_chunks_mut<T: Send>(
        &self,
        data: &mut [T],
        chunk: usize,
        work: &(dyn Fn(usize, &mut [T]) + Sync),
    ) -> Result<(), PoolError> {
        let chunk = chunk.max(1);
        let length = data.len();
        let base = Base(data.as_mut_ptr());
        self.run(length.div_ceil(chunk), &|task| {
            let start = task * chunk;
            // SAFETY: each task number is handed out once, so the pieces are disjoint parts of `data`, which this
            // call borrows exclusively until all tasks are done.
            let piece =
                unsafe { std::slice::from_raw_parts_mut(base.get().add(start), chunk.min(length - start)) };
            work(task, piece);
        })
    }
}

struct Base<T>(*mut T);

impl<T> Base<T> {
    fn get(&self) -> *mut T {
        self.0
    }
}

// SAFETY: only used to make disjoint `&mut [T]` on several threads, which `T: Send` allows.
unsafe impl<T: Send> Sync for Base<T> {}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        for sleeper in &self.sleepers {
            sleeper.unpark();
        }
        for worker in self.workers.drain(..) {
            // A worker never unwinds; there is nothing to report.
            let _ = worker.join();
        }
    }
}

/// How many threads to use when nobody says: the physical cores this process may run on, at most [`MAX_THREADS`].
pub fn default_threads() -> usize {
    let logical = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    physical_cores().map_or(logical, |cores| cores.min(logical)).clamp(1, MAX_THREADS)
}

/// Physical cores among the processors this process may use, as Linux tells them; `None` elsewhere.
fn physical_cores() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let siblings = |cpu: usize| {
        std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
            .ok()
    };
    let cores: Option<HashSet<String>> = parse_cpu_list(allowed)?.into_iter().map(siblings).collect();
    cores.map(|cores| cores.len()).filter(|count| *count > 0)
}

/// `0-3,8,10-11` as numbers; `None` when malformed.
fn parse_cpu_list(list: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let first: usize = first.trim().parse().ok()?;
        let last: usize = last.trim().parse().ok()?;
        if last >= 1 << 16 {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
