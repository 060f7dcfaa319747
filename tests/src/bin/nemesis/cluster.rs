//! Nodes and workers of a run, each a process of `ownerserve` in its own slot, and the operator requests to them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::NemesisError;
use crate::api_client::{ClusterAddresses, MemberJson, NodeStatusJson};
use crate::history::MemberSlot;
use crate::node::{LaunchSpec, ProgramProcess, free_port, log_tail_of, wait_until_listening};
use crate::test_network::{MAX_SLOTS, SyscallFaultInjector, TestNetwork};

/// Timeout until a started node serves operators; a restart may have to replay a log.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Size of the disk that can be filled, as a mount option.
const SMALL_DISK: &str = "size=192m";

/// Settings common to all nodes.
#[derive(Clone, Debug)]
pub(crate) struct ClusterSetup {
    /// Binary under test.
    pub(crate) binary: PathBuf,
    /// Folder for all files of this run.
    pub(crate) folder: PathBuf,
    /// Duration of worker leases.
    pub(crate) lease: Duration,
    /// Slot with a small disk, if one can be mounted.
    pub(crate) small_disk: Option<MemberSlot>,
    /// Injection of disk and clock faults, if available.
    pub(crate) syscall_faults: Option<SyscallFaultInjector>,
}

/// How a node with an empty data directory gets into a cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NodeBootstrapMode {
    /// Founds a cluster of one and does not listen for other nodes.
    Standalone,
    /// Founds the cluster.
    Founder,
    /// Joins through the node in this slot.
    JoinsThrough(MemberSlot),
}

/// How a node is started this time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct NodeStartMode {
    /// How it gets into the cluster.
    pub(crate) origin: NodeBootstrapMode,
    /// Highest feature level it may know, to act as an older binary.
    pub(crate) max_level: Option<u32>,
}

impl NodeStartMode {
    /// Starts the binary as it is, without a level limit.
    pub(crate) fn new(origin: NodeBootstrapMode) -> NodeStartMode {
        NodeStartMode { origin, max_level: None }
    }
}

struct NodeSlot {
    running: Option<ProgramProcess>,
    boot: NodeStartMode,
}

/// All processes of a run.
pub(crate) struct ProcessCluster {
    setup: ClusterSetup,
    network: Arc<TestNetwork>,
    ports: Vec<(u16, u16)>,
    slots: BTreeMap<MemberSlot, NodeSlot>,
    workers: Vec<(String, ProgramProcess)>,
    addresses: ClusterAddresses,
}

impl ProcessCluster {
    /// Creates a cluster without nodes; the workers are started.
    pub(crate) async fn new(
        setup: ClusterSetup,
        ground: Arc<TestNetwork>,
        workers: usize,
    ) -> Result<ProcessCluster, NemesisError> {
        std::fs::create_dir_all(&setup.folder).map_err(NemesisError::system(setup.folder.display().to_string()))?;
        let (mut ports, mut operators) = (Vec::new(), BTreeMap::new());
        for seat in (1..=MAX_SLOTS).map(MemberSlot) {
            let (client, operator) = (free_port()?, free_port()?);
            operators.insert(
                seat,
                (
                    SocketAddr::new(ground.own_address(seat), operator),
                    SocketAddr::new(ground.own_address(seat), client),
                ),
            );
            ports.push((client, operator));
        }
        let addresses = ClusterAddresses::new(operators);
        let mut cluster =
            ProcessCluster { setup, network: ground, ports, slots: BTreeMap::new(), workers: Vec::new(), addresses };
        for number in 1..=workers {
            cluster.start_worker(number).await?;
        }
        if let Some(slot) = cluster.setup.small_disk {
            let folder = cluster.folder(slot);
            std::fs::create_dir_all(&folder).map_err(NemesisError::system("make a mount point"))?;
            crate::test_network::mount_small(&folder, SMALL_DISK).await?;
        }
        Ok(cluster)
    }

    async fn start_worker(&mut self, number: usize) -> Result<(), NemesisError> {
        let address = SocketAddr::new(self.network.host_address(), free_port()?);
        let name = format!("worker{number}");
        let arguments = ["sim-worker", "--exit-with-parent", "--role", "hybrid", "--speed-up", "50", "--listen"];
        let arguments = arguments.iter().map(|part| (*part).to_owned()).chain([address.to_string()]).collect();
        let log = self.setup.folder.join(format!("{name}.log"));
        let binary = &self.setup.binary.clone();
        let mut running = ProgramProcess::start(LaunchSpec {
            name: &name,
            launcher: Vec::new(),
            binary,
            arguments,
            environment: Vec::new(),
            log,
        })?;
        wait_until_listening(&mut running, address, START_TIMEOUT).await?;
        self.workers.push((format!("http://{address}"), running));
        Ok(())
    }

    /// Operator and client addresses of the nodes.
    pub(crate) fn addresses(&self) -> &ClusterAddresses {
        &self.addresses
    }

    /// Binary under test.
    pub(crate) fn binary(&self) -> &Path {
        &self.setup.binary
    }

    /// Data directory of a node.
    pub(crate) fn folder(&self, slot: MemberSlot) -> PathBuf {
        self.setup.folder.join(format!("node{}", slot.0))
    }

    fn log(&self, slot: MemberSlot) -> PathBuf {
        self.setup.folder.join(format!("node{}.log", slot.0))
    }

    /// Slots that were ever occupied.
    pub(crate) fn seats(&self) -> Vec<MemberSlot> {
        self.slots.keys().copied().collect()
    }

    /// Slot whose disk can be filled.
    pub(crate) fn small_disk(&self) -> Option<MemberSlot> {
        self.setup.small_disk.filter(|seat| self.slots.contains_key(seat))
    }

    /// Injection of disk and clock faults, if available.
    pub(crate) fn syscall_faults(&self) -> Option<&SyscallFaultInjector> {
        self.setup.syscall_faults.as_ref()
    }

    /// Slots of running nodes, without the paused ones.
    pub(crate) fn running_slots(&self) -> Vec<MemberSlot> {
        let awake = |place: &NodeSlot| place.running.as_ref().is_some_and(|running| !running.is_paused());
        self.slots.iter().filter(|(_, place)| awake(place)).map(|(seat, _)| *seat).collect()
    }

    /// Starts a node and waits until it serves operators.
    pub(crate) async fn start(&mut self, slot: MemberSlot, boot: NodeStartMode) -> Result<(), NemesisError> {
        let mut running = self.launch(slot, boot)?;
        let address = self.addresses.operator(slot);
        wait_until_listening(&mut running, address, START_TIMEOUT).await?;
        self.register_process(slot, running, boot);
        Ok(())
    }

    /// Starts a node that founds a separate cluster.
    pub(crate) async fn start_separate(
        &self,
        slot: MemberSlot,
        boot: NodeStartMode,
    ) -> Result<ProgramProcess, NemesisError> {
        let mut running = self.launch(slot, boot)?;
        wait_until_listening(&mut running, self.addresses.operator(slot), START_TIMEOUT).await?;
        Ok(running)
    }

    /// Starts a node that is expected to fail; returns its output after it has exited.
    pub(crate) async fn start_expecting_failure(
        &mut self,
        slot: MemberSlot,
        boot: NodeStartMode,
    ) -> Result<String, NemesisError> {
        let before = self.log_text(slot).len();
        let mut running = self.launch(slot, boot)?;
        let address = self.addresses.operator(slot);
        match wait_until_listening(&mut running, address, START_TIMEOUT).await {
            Ok(()) => {
                running.kill().await?;
                Err(NemesisError::Answer { who: format!("node {}", slot.0), got: "it started all the same".into() })
            }
            Err(NemesisError::Late { what }) => Err(NemesisError::Late { what }),
            Err(_) => Ok(self.log_text(slot).split_off(before)),
        }
    }

    fn register_process(&mut self, slot: MemberSlot, process: ProgramProcess, boot: NodeStartMode) {
        self.slots.insert(slot, NodeSlot { running: Some(process), boot });
    }

    fn launch(&self, slot: MemberSlot, boot: NodeStartMode) -> Result<ProgramProcess, NemesisError> {
        let name = format!("node {}", slot.0);
        let (client, operator) = self.ports[usize::from(slot.0) - 1];
        let home = self.network.own_address(slot);
        let shadow = self.network.relay_address(slot);
        let at_home = |port: u16| SocketAddr::new(home, port).to_string();
        let mut arguments: Vec<String> = vec!["serve".into(), "--exit-with-parent".into()];
        let mut flag = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
        flag("--listen", at_home(client));
        flag("--operator-listen", at_home(operator));
        flag("--data-dir", self.folder(slot).display().to_string());
        flag("--set", format!("ledger.lease_duration={}ms", self.setup.lease.as_millis()));
        flag("--set", "models.tiny.tokenizer_dir=builtin".into());
        if boot.origin != NodeBootstrapMode::Standalone {
            flag("--cluster-listen", at_home(shadow.port()));
            flag("--set", format!("cluster.advertise={shadow}"));
            // Plain traffic is safe: its addresses are in namespaces that nobody else is in.
            flag("--set", "cluster.allow_plaintext=true".into());
        }
        if let NodeBootstrapMode::JoinsThrough(slot) = boot.origin {
            flag("--join", self.network.relay_address(slot).to_string());
        }
        if let Some(level) = boot.max_level {
            flag("--set", format!("cluster.max_feature_level={level}"));
        }
        for (worker, _) in &self.workers {
            flag("--worker", worker.clone());
        }
        let launcher = self.network.launcher(slot);
        let levers = self.setup.syscall_faults.as_ref().map(|levers| levers.environment(slot)).transpose()?;
        let (environment, log) = (levers.unwrap_or_default(), self.log(slot));
        let launch = LaunchSpec { name: &name, launcher, binary: &self.setup.binary, arguments, environment, log };
        let running = ProgramProcess::start(launch)?;
        // A node calls the others before it listens.
        if let Some(pid) = running.pid() {
            self.network.register_process(slot, pid);
        }
        Ok(running)
    }

    /// Restarts a node as it was started last.
    pub(crate) async fn restart(&mut self, slot: MemberSlot) -> Result<(), NemesisError> {
        let boot = self.boot(slot)?;
        self.start(slot, boot).await
    }

    /// How a node was started last.
    pub(crate) fn boot(&self, slot: MemberSlot) -> Result<NodeStartMode, NemesisError> {
        let never = || NemesisError::Answer { who: format!("node {}", slot.0), got: "never started".into() };
        self.slots.get(&slot).map(|place| place.boot).ok_or_else(never)
    }

    /// Process of a node.
    pub(crate) fn running(&mut self, slot: MemberSlot) -> Result<&mut ProgramProcess, NemesisError> {
        let running = self.slots.get_mut(&slot).and_then(|place| place.running.as_mut());
        running.ok_or_else(|| NemesisError::Answer { who: format!("node {}", slot.0), got: "it does not run".into() })
    }

    /// Removes a node's process from the cluster, to end it.
    pub(crate) fn take(&mut self, slot: MemberSlot) -> Result<ProgramProcess, NemesisError> {
        let running = self.slots.get_mut(&slot).and_then(|place| place.running.take());
        running.ok_or_else(|| NemesisError::Answer { who: format!("node {}", slot.0), got: "it does not run".into() })
    }

    /// Complete log of a node.
    pub(crate) fn log_text(&self, slot: MemberSlot) -> String {
        String::from_utf8_lossy(&std::fs::read(self.log(slot)).unwrap_or_default()).into_owned()
    }

    /// Last lines of a node's log.
    pub(crate) fn log_tail(&self, slot: MemberSlot) -> String {
        log_tail_of(&self.log(slot))
    }

    /// Slots of nodes that exited without being stopped.
    pub(crate) fn crashed_slots(&mut self) -> Vec<MemberSlot> {
        let ended =
            |place: &mut NodeSlot| place.running.as_mut().is_some_and(|running| running.exit_status().is_some());
        self.slots.iter_mut().filter_map(|(seat, place)| ended(place).then_some(*seat)).collect()
    }

    /// Deletes everything in a stopped node's data directory.
    pub(crate) fn wipe(&self, slot: MemberSlot) -> Result<(), NemesisError> {
        let folder = self.folder(slot);
        let what = || format!("empty {}", folder.display());
        std::fs::create_dir_all(&folder).map_err(NemesisError::system(what()))?;
        // The folder itself may be a mount point, so only its contents are deleted.
        for entry in std::fs::read_dir(&folder).map_err(NemesisError::system(what()))?.flatten() {
            let path = entry.path();
            let gone = if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
            gone.map_err(NemesisError::system(what()))?;
        }
        Ok(())
    }

    /// Returns the member in this slot as the node `asked` knows it.
    pub(crate) async fn member(&self, slot: MemberSlot, asked: MemberSlot) -> Result<MemberJson, NemesisError> {
        let address = self.network.relay_address(slot).to_string();
        let members = self.addresses.members(asked).await?;
        let missing =
            || NemesisError::Answer { who: format!("node {}", asked.0), got: format!("no member at {address}") };
        members.into_iter().find(|member| member.address == address).ok_or_else(missing)
    }

    /// Returns the leader's slot once most running nodes agree on one.
    pub(crate) async fn leader(&self, within: Duration) -> Result<MemberSlot, NemesisError> {
        let deadline = Instant::now() + within;
        loop {
            if let Some(leader) = self.agreed_leader().await {
                return Ok(leader);
            }
            if Instant::now() > deadline {
                return Err(NemesisError::Late { what: "a leader that most nodes agree on".into() });
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn agreed_leader(&self) -> Option<MemberSlot> {
        let statuses = self.statuses().await;
        let mut votes: BTreeMap<u64, usize> = BTreeMap::new();
        // A partitioned node names no leader.
        for leader in statuses.iter().filter_map(|(_, status)| status.leader) {
            *votes.entry(leader).or_default() += 1;
        }
        let (leader, agreed) = votes.into_iter().max_by_key(|(_, agreed)| *agreed)?;
        let own = statuses.iter().find(|(_, status)| status.node_id == leader && status.leader == Some(leader));
        own.filter(|_| agreed * 2 > statuses.len()).map(|(seat, _)| *seat)
    }

    /// Status of every node that responds.
    pub(crate) async fn statuses(&self) -> Vec<(MemberSlot, NodeStatusJson)> {
        let asked =
            self.running_slots().into_iter().map(|seat| async move { (seat, self.addresses.status(seat).await) });
        let answered = futures::future::join_all(asked).await;
        answered.into_iter().filter_map(|(seat, status)| status.ok().map(|status| (seat, status))).collect()
    }

    /// Process of a worker.
    pub(crate) fn worker(&mut self, at: usize) -> Option<&mut ProgramProcess> {
        self.workers.get_mut(at).map(|(_, running)| running)
    }
}
