//! The simulated async runtime as a process sees it: its own tasks, and a clock that drifts.

use std::future::Future;
use std::io;
use std::ops::{Add, AddAssign, Sub, SubAssign};
use std::time::Duration;

use openraft::AsyncRuntime;
use openraft::async_runtime::instant::Instant as _;
use openraft_rt_sim::{SimInstant, SimRuntime};

use crate::process;

#[derive(Debug)]
pub(crate) struct SimulatedRuntime(SimRuntime);

impl SimulatedRuntime {
    /// Creates a runtime whose random numbers derive from the seed.
    pub(crate) fn with_seed(seed: u64) -> Self {
        Self(SimRuntime::with_seed(seed))
    }
}

/// Returns the true time since the world began, which no process knows.
pub(crate) fn true_time() -> Duration {
    SimInstant::now().elapsed_since_start()
}

const MILLION: i128 = 1_000_000;

/// Reading of a process's monotonic clock, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct ProcessInstant(u64);

impl ProcessInstant {
    /// Returns the true time that passes while this process's clock advances by `span`.
    fn to_true_time(span: Duration) -> Duration {
        let drift = i128::from(process::drift());
        let rounded = i128::from(drift != 0 && !span.is_zero());
        // Rounded up, so that the process's own clock has advanced by the whole span.
        let nanos = span.as_nanos() as i128 * MILLION / (MILLION + drift) + rounded;
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX / 4))
    }
}

impl openraft::async_runtime::instant::Instant for ProcessInstant {
    fn now() -> Self {
        // Starts at one day, so that subtracting a span does not underflow.
        let truth = true_time().as_nanos() as i128 + 86_400_000_000_000;
        Self((truth * (MILLION + i128::from(process::drift())) / MILLION) as u64)
    }
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

impl Add<Duration> for ProcessInstant {
    type Output = Self;

    fn add(self, span: Duration) -> Self {
        Self(self.0.saturating_add(nanos(span)))
    }
}

impl AddAssign<Duration> for ProcessInstant {
    fn add_assign(&mut self, span: Duration) {
        *self = *self + span;
    }
}

impl Sub<Duration> for ProcessInstant {
    type Output = Self;

    fn sub(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(nanos(span)))
    }
}

impl SubAssign<Duration> for ProcessInstant {
    fn sub_assign(&mut self, span: Duration) {
        *self = *self - span;
    }
}

impl Sub<ProcessInstant> for ProcessInstant {
    type Output = Duration;

    fn sub(self, earlier: ProcessInstant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl AsyncRuntime for SimulatedRuntime {
    type JoinError = <SimRuntime as AsyncRuntime>::JoinError;
    type JoinHandle<T: Send + 'static> = <SimRuntime as AsyncRuntime>::JoinHandle<T>;
    type Sleep = <SimRuntime as AsyncRuntime>::Sleep;
    type Instant = ProcessInstant;
    type TimeoutError = <SimRuntime as AsyncRuntime>::TimeoutError;
    type Timeout<R, T: Future<Output = R> + Send> = <SimRuntime as AsyncRuntime>::Timeout<R, T>;
    type ThreadLocalRng = <SimRuntime as AsyncRuntime>::ThreadLocalRng;

    fn spawn<T>(future: T) -> Self::JoinHandle<T::Output>
    where
        T: Future + Send + 'static,
        T::Output: Send + 'static,
    {
        SimRuntime::spawn(process::ProcessTask::new(future))
    }

    fn sleep(duration: Duration) -> Self::Sleep {
        SimRuntime::sleep(ProcessInstant::to_true_time(duration))
    }

    fn sleep_until(deadline: Self::Instant) -> Self::Sleep {
        Self::sleep(deadline - ProcessInstant::now())
    }

    fn timeout<R, F: Future<Output = R> + Send>(duration: Duration, future: F) -> Self::Timeout<R, F> {
        SimRuntime::timeout(ProcessInstant::to_true_time(duration), future)
    }

    fn timeout_at<R, F: Future<Output = R> + Send>(deadline: Self::Instant, future: F) -> Self::Timeout<R, F> {
        Self::timeout(deadline - ProcessInstant::now(), future)
    }

    fn is_panic(join_error: &Self::JoinError) -> bool {
        SimRuntime::is_panic(join_error)
    }

    fn thread_rng() -> Self::ThreadLocalRng {
        SimRuntime::thread_rng()
    }

    type Mpsc = <SimRuntime as AsyncRuntime>::Mpsc;
    type Watch = <SimRuntime as AsyncRuntime>::Watch;
    type Oneshot = <SimRuntime as AsyncRuntime>::Oneshot;
    type Mutex<T: Send + 'static> = <SimRuntime as AsyncRuntime>::Mutex<T>;

    fn new(threads: usize) -> Self {
        Self(SimRuntime::new(threads))
    }

    fn block_on<F, T>(&mut self, future: F) -> T
    where
        F: Future<Output = T>,
    {
        self.0.block_on(future)
    }

    fn spawn_blocking<F, T>(_work: F) -> impl Future<Output = Result<T, io::Error>> + Send
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        std::future::ready(Err(io::Error::new(io::ErrorKind::Unsupported, "the simulation has no threads")))
    }
}
