//! Simulated processes inside one runtime: every task belongs to one, and a process can be paused or killed between any
//! two polls.
//!
//! A killed process never runs again, not even to clean up. Its calls in flight stay unanswered, as after `kill -9`.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// Id of a simulated process. The world itself is one that is never paused or killed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Pid(usize);

impl Pid {
    /// The network, the clients and the schedule.
    pub(crate) const WORLD: Pid = Pid(0);
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SimProcessState {
    Running,
    Paused,
    Dead,
}

#[derive(Debug)]
struct SimProcess {
    state: SimProcessState,
    /// How much its clock runs fast, in parts per million.
    drift: i64,
    parked: Vec<Waker>,
}

thread_local! {
    static PROCESSES: RefCell<Vec<SimProcess>> = const { RefCell::new(Vec::new()) };
    static CURRENT: RefCell<Pid> = const { RefCell::new(Pid::WORLD) };
}

/// Starts a world without processes.
pub(crate) fn reset() {
    let old = PROCESSES.with_borrow_mut(std::mem::take);
    drop(old);
    CURRENT.set(Pid::WORLD);
    begin(0);
}

/// Starts a process whose clock drifts by `drift` parts per million.
pub(crate) fn begin(drift: i64) -> Pid {
    PROCESSES.with_borrow_mut(|all| {
        all.push(SimProcess { state: SimProcessState::Running, drift, parked: Vec::new() });
        Pid(all.len() - 1)
    })
}

/// Stops a process for good.
pub(crate) fn kill(pid: Pid) {
    wake(pid, SimProcessState::Dead);
}

/// Pauses a process until it is resumed. Time passes meanwhile, and messages for it wait.
pub(crate) fn pause(pid: Pid) {
    let set = |process: &mut SimProcess| process.state = SimProcessState::Paused;
    PROCESSES
        .with_borrow_mut(|all| all.get_mut(pid.0).filter(|process| process.state == SimProcessState::Running).map(set));
}

/// Resumes a paused process.
pub(crate) fn resume(pid: Pid) {
    if is_alive(pid) {
        wake(pid, SimProcessState::Running);
    }
}

/// Returns whether a process was not killed; a paused one is alive.
pub(crate) fn is_alive(pid: Pid) -> bool {
    PROCESSES.with_borrow(|all| all.get(pid.0).is_some_and(|process| process.state != SimProcessState::Dead))
}

pub(crate) fn is_running(pid: Pid) -> bool {
    PROCESSES.with_borrow(|all| all.get(pid.0).is_some_and(|process| process.state == SimProcessState::Running))
}

pub(crate) fn current() -> Pid {
    CURRENT.with_borrow(|pid| *pid)
}

pub(crate) fn drift() -> i64 {
    let pid = current();
    PROCESSES.with_borrow(|all| all.get(pid.0).map_or(0, |process| process.drift))
}

/// Runs `act` as a process: tasks that it spawns belong to that process.
pub(crate) fn run_in<T>(pid: Pid, act: impl FnOnce() -> T) -> T {
    let _scope = CurrentProcessGuard::enter(pid);
    act()
}

fn wake(pid: Pid, state: SimProcessState) {
    let parked = PROCESSES.with_borrow_mut(|all| {
        let process = all.get_mut(pid.0)?;
        process.state = state;
        Some(std::mem::take(&mut process.parked))
    });
    parked.unwrap_or_default().into_iter().for_each(Waker::wake);
}

struct CurrentProcessGuard(Pid);

impl CurrentProcessGuard {
    fn enter(pid: Pid) -> Self {
        Self(CURRENT.replace(pid))
    }
}

impl Drop for CurrentProcessGuard {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}

pub(crate) struct ProcessTask<F> {
    pid: Pid,
    future: Option<Pin<Box<F>>>,
}

impl<F> ProcessTask<F> {
    pub(crate) fn new(future: F) -> Self {
        Self { pid: current(), future: Some(Box::pin(future)) }
    }

    fn gate(&self, waker: &Waker) -> SimProcessState {
        PROCESSES.with_borrow_mut(|all| match all.get_mut(self.pid.0) {
            None => SimProcessState::Dead,
            Some(process) => {
                if process.state == SimProcessState::Paused {
                    process.parked.push(waker.clone());
                }
                process.state
            }
        })
    }
}

impl<F: Future> Future for ProcessTask<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let state = self.gate(context.waker());
        let _scope = CurrentProcessGuard::enter(self.pid);
        match state {
            SimProcessState::Running => match &mut self.future {
                Some(future) => future.as_mut().poll(context),
                None => Poll::Pending,
            },
            SimProcessState::Paused => Poll::Pending,
            SimProcessState::Dead => {
                self.future = None;
                Poll::Pending
            }
        }
    }
}
