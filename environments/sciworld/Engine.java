import java.io.BufferedInputStream;
import java.io.BufferedOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.io.PrintStream;
import java.lang.reflect.Field;
import java.nio.charset.StandardCharsets;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.LinkedBlockingQueue;

import main.scala.scienceworld.runtime.Simplification;
import main.scala.scienceworld.runtime.SimplifierProcessor$;
import scala.Tuple3;
import scala.collection.mutable.ArrayBuffer;
import scienceworld.objects.agent.Agent;
import scienceworld.runtime.AgentInterface;
import scienceworld.runtime.pythonapi.PythonInterface;
import util.UniqueIdentifier$;

/**
 * Many independent ScienceWorld episodes in one JVM, served over stdin and stdout.
 *
 * <p>ScienceWorld keeps three things in process-wide Scala objects: the simplifications in force, the
 * counter of object ids, and scala.util.Random. Nothing else in its JAR is both static and mutable (a test
 * lists them from the class files). One thread serves all requests; before each, the three are swapped for
 * those of the episode concerned, as an operating system swaps registers. So an episode reads and writes
 * exactly what it would alone, all episodes share compiled code, and an episode costs megabytes, not a
 * class loader.
 *
 * <p>Request: int32 size, then byte command, int32 episode, and for those that load: task, int32 variation,
 * simplifications; for step: action. Answer: byte status (0 = fine, 1 = fault, text says which), text, float64
 * score, byte completed. A text is int32 size and UTF-8. Lists are joined by line feeds.
 *
 * <p>Built by `python -m environments.sciworld.build --jar` (needs a JDK; users need only a JRE).
 */
public final class Engine {
    /** What belongs to one episode: its interface and its copy of the engine's process-wide state. */
    private static final class Episode {
        PythonInterface python; // given once the episode is active, as making one draws random numbers and ids
        final Random random = new Random();
        List<Simplification> simplifications = new ArrayList<>();
        long count = 0;
    }

    private static final Map<Integer, Episode> EPISODES = new HashMap<>();
    /** Interfaces of dropped episodes: load() renews all they hold, and making one costs as much as a load. */
    private static final Deque<PythonInterface> SPARE = new ArrayDeque<>();
    private static Episode active = null;
    private static final int MAX_SPARE = 256;
    private static Field randomSelf;

    public static void main(String[] args) throws Exception {
        DataOutputStream out = new DataOutputStream(new BufferedOutputStream(System.out));
        // The engine prints a page per action; swallow it before scala.Console takes hold of System.out.
        System.setOut(new PrintStream(new OutputStream() {
            @Override public void write(int b) {}
            @Override public void write(byte[] b, int offset, int length) {}
        }));
        randomSelf = scala.util.Random.class.getDeclaredField("self");
        randomSelf.setAccessible(true);

        // A thread of its own reads, so that the death of the parent (end of stdin) also ends a long request.
        LinkedBlockingQueue<byte[]> requests = new LinkedBlockingQueue<>();
        Thread reader = new Thread(() -> {
            try {
                DataInputStream in = new DataInputStream(new BufferedInputStream(System.in));
                while (true) {
                    byte[] request = new byte[in.readInt()];
                    in.readFully(request);
                    requests.add(request);
                }
            } catch (IOException endOfInput) {
                Runtime.getRuntime().halt(0);
            }
        });
        reader.setDaemon(true);
        reader.start();

        while (true) {
            byte[] request = requests.take();
            DataInputStream in = new DataInputStream(new java.io.ByteArrayInputStream(request));
            try {
                serve(in, out);
            } catch (VirtualMachineError error) {
                Runtime.getRuntime().halt(3);
            } catch (Throwable error) {
                answer(out, 1, error.toString(), 0.0, false);
            }
        }
    }

    private static void serve(DataInputStream in, DataOutputStream out) throws Exception {
        byte command = in.readByte();
        int id = in.readInt();
        if (command == 'D') { // drop
            Episode dropped = EPISODES.remove(id);
            if (dropped == active) active = null;
            if (dropped != null && dropped.python != null && SPARE.size() < MAX_SPARE) {
                clear(dropped.python);
                SPARE.push(dropped.python);
            }
            answer(out, 0, "", 0.0, false);
            return;
        }
        boolean loads = command == 'L' || command == 'G' || command == 'V';
        if (loads) EPISODES.put(id, new Episode());
        Episode episode = EPISODES.get(id);
        if (episode == null) throw new IllegalStateException("no episode " + id);
        activate(episode);
        if (episode.python == null) episode.python = SPARE.isEmpty() ? new PythonInterface() : SPARE.pop();
        PythonInterface python = episode.python;
        if (loads) {
            String error = python.load(readText(in), in.readInt(), readText(in), command == 'G');
            if (!error.isEmpty()) throw new IllegalStateException(error);
        }

        if (command == 'L') { // load: the first observation
            python.taskMaker_$eq(null); // every task's objects, 12 MB that only load() and 'V' need
            answer(out, 0, python.getTaskDescription() + "\n" + python.freeActionLook(), 0.0, false);
        } else if (command == 'G') { // gold path
            answer(out, 0, String.join("\n", python.getGoldActionSequence()), 0.0, false);
        } else if (command == 'V') { // variations of train, dev and test, a line each
            String text = python.getVariationsTrain() + "\n" + python.getVariationsDev() + "\n"
                + python.getVariationsTest();
            answer(out, 0, text, 0.0, false);
        } else if (command == 'S') { // step
            step(python, readText(in), out);
        } else if (command == 'A') { // admissible actions
            answer(out, 0, String.join("\n", python.getValidActionObjectCombinations()), 0.0, false);
        } else {
            throw new IllegalStateException("no command " + (char) command);
        }
    }

    /** PythonInterface.step without what it does for its own log: look, inventory, referents, history. */
    private static void step(PythonInterface python, String action, DataOutputStream out) throws IOException {
        String word = action.trim().toLowerCase();
        if (word.equals("help") || word.equals("objects") || word.equals("task")) {
            answer(out, 0, python.step(action), python.getScore(), python.getCompleted());
            return;
        }
        AgentInterface agent = python.agentInterface().get();
        Tuple3<String, Object, Object> result = agent.step(action);
        // The engine catches its own exceptions and would answer the next action with a score of -100.
        if (agent.isInErrorState()) throw new IllegalStateException(agent.getErrorStateMessage());
        python.score_$eq((Double) result._2());
        python.isComplete_$eq((Boolean) result._3());
        String text = result._1();
        if (text.isEmpty()) {
            text = "Unknown action.  Type 'help' for a list of actions, "
                + "and 'objects' for a list of possible object referents. ";
        }
        answer(out, 0, text, python.getScore(), python.getCompleted());
    }

    /** Let the garbage collector have what an episode held, and forget its score. */
    private static void clear(PythonInterface python) {
        python.agentInterface_$eq(scala.Option.apply((AgentInterface) null));
        python.agent_$eq(scala.Option.apply((Agent) null));
        python.score_$eq(0.0);
        python.isComplete_$eq(false);
    }

    private static void activate(Episode next) throws IllegalAccessException {
        if (next == active) return;
        ArrayBuffer<Simplification> inForce = SimplifierProcessor$.MODULE$.simplifications();
        if (active != null) {
            active.count = UniqueIdentifier$.MODULE$.count();
            active.simplifications = new ArrayList<>();
            for (int i = 0; i < inForce.length(); i++) active.simplifications.add(inForce.apply(i));
        }
        UniqueIdentifier$.MODULE$.count_$eq(next.count);
        inForce.clear();
        for (Simplification simplification : next.simplifications) inForce.$plus$eq(simplification);
        randomSelf.set(scala.util.Random$.MODULE$, next.random);
        active = next;
    }

    private static String readText(DataInputStream in) throws IOException {
        byte[] bytes = new byte[in.readInt()];
        in.readFully(bytes);
        return new String(bytes, StandardCharsets.UTF_8);
    }

    private static void answer(DataOutputStream out, int status, String text, double score, boolean completed)
            throws IOException {
        byte[] bytes = text.getBytes(StandardCharsets.UTF_8);
        out.writeByte(status);
        out.writeInt(bytes.length);
        out.write(bytes);
        out.writeDouble(score);
        out.writeBoolean(completed);
        out.flush();
    }
}
