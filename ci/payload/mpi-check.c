// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//
// What lane `software` runs with Open MPI; a guest compiles it with mpicc.
//
//   mpi-check TEST SIZE ROUNDS [TEST SIZE ROUNDS]...
//
//   ring         a message of SIZE bytes goes around all processes ROUNDS times
//   alltoall     each process sends SIZE bytes to each, ROUNDS times, in two ways
//   put          each process puts SIZE bytes to its neighbour, ROUNDS times
//   latency      half the round trip of SIZE bytes between processes 0 and 1
//   bandwidth    ROUNDS windows of messages of SIZE bytes from process 0 to 1
//
// Contents depend on the sender, the receiver and the round, and each receiver verifies them; latency and bandwidth verify
// the last round alone. A process that finds something wrong aborts all. Process 0 prints `TEST SIZE NAME VALUE UNIT` for
// what it measured, and `verified TEST SIZE` after each test.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Messages that are under way at once where bandwidth is measured.
#define WINDOW 32

static int rank;
static int processes;

static void *allocate(size_t size)
{
	void *memory = malloc(size ? size : 1);

	if (!memory) {
		fprintf(stderr, "process %d has no memory for %zu bytes\n", rank, size);
		MPI_Abort(MPI_COMM_WORLD, 2);
	}
	return memory;
}

static unsigned char expected(int from, int to, int round, int at)
{
	unsigned int value = (unsigned int)from * 2654435761u + (unsigned int)to * 40503u +
			     (unsigned int)round * 977u + (unsigned int)at * 131u;

	return (unsigned char)(value ^ (value >> 11));
}

static void fill(unsigned char *data, int size, int from, int to, int round)
{
	for (int at = 0; at < size; at++)
		data[at] = expected(from, to, round, at);
}

static void verify(const unsigned char *data, int size, int from, int to, int round)
{
	for (int at = 0; at < size; at++) {
		unsigned char wanted = expected(from, to, round, at);

		if (data[at] != wanted) {
			fprintf(stderr, "process %d: byte %d from %d in round %d is %#x and not %#x\n", rank, at, from,
				round, data[at], wanted);
			MPI_Abort(MPI_COMM_WORLD, 3);
		}
	}
}

static void ring(int size, int rounds)
{
	int previous = (rank + processes - 1) % processes, next = (rank + 1) % processes;
	unsigned char *out = allocate((size_t)size), *in = allocate((size_t)size);

	for (int round = 0; round < rounds; round++) {
		fill(out, size, rank, next, round);
		memset(in, 0, (size_t)size);
		// Process 0 starts each round, and everybody else waits for it to come by.
		if (rank == 0)
			MPI_Send(out, size, MPI_BYTE, next, round, MPI_COMM_WORLD);
		MPI_Recv(in, size, MPI_BYTE, previous, round, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		verify(in, size, previous, rank, round);
		if (rank != 0)
			MPI_Send(out, size, MPI_BYTE, next, round, MPI_COMM_WORLD);
	}
	free(out);
	free(in);
}

static void all_to_all(int size, int rounds)
{
	size_t all = (size_t)size * (size_t)processes;
	unsigned char *out = allocate(all), *in = allocate(all);
	MPI_Request *requests = allocate(2 * (size_t)processes * sizeof(*requests));

	for (int round = 0; round < rounds; round++) {
		for (int to = 0; to < processes; to++)
			fill(out + (size_t)to * (size_t)size, size, rank, to, round);
		memset(in, 0, all);
		if (round % 2 == 0) {
			MPI_Alltoall(out, size, MPI_BYTE, in, size, MPI_BYTE, MPI_COMM_WORLD);
		} else {
			for (int peer = 0; peer < processes; peer++) {
				size_t offset = (size_t)peer * (size_t)size;

				MPI_Irecv(in + offset, size, MPI_BYTE, peer, round, MPI_COMM_WORLD, &requests[2 * peer]);
				MPI_Isend(out + offset, size, MPI_BYTE, peer, round, MPI_COMM_WORLD,
					  &requests[2 * peer + 1]);
			}
			MPI_Waitall(2 * processes, requests, MPI_STATUSES_IGNORE);
		}
		for (int from = 0; from < processes; from++)
			verify(in + (size_t)from * (size_t)size, size, from, rank, round);
	}
	free(out);
	free(in);
	free(requests);
}

static void put(int size, int rounds)
{
	int previous = (rank + processes - 1) % processes, next = (rank + 1) % processes;
	unsigned char *out = allocate((size_t)size), *in;
	MPI_Win window;

	MPI_Win_allocate(size, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &in, &window);
	for (int round = 0; round < rounds; round++) {
		fill(out, size, rank, next, round);
		MPI_Win_fence(0, window);
		MPI_Put(out, size, MPI_BYTE, next, 0, size, MPI_BYTE, window);
		MPI_Win_fence(0, window);
		verify(in, size, previous, rank, round);
	}
	MPI_Win_free(&window);
	free(out);
}

static int by_value(const void *left, const void *right)
{
	double a = *(const double *)left, b = *(const double *)right;

	return (a > b) - (a < b);
}

static void latency(int size, int rounds)
{
	int warm_up = rounds / 10 + 10;
	unsigned char *out = allocate((size_t)size), *in = allocate((size_t)size);
	double *times = allocate((size_t)rounds * sizeof(*times)), sum = 0;

	fill(out, size, rank, 1 - rank, rounds);
	MPI_Barrier(MPI_COMM_WORLD);
	for (int round = -warm_up; round < rounds && rank < 2; round++) {
		double start = MPI_Wtime();

		if (rank == 0) {
			MPI_Send(out, size, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
			MPI_Recv(in, size, MPI_BYTE, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		} else {
			MPI_Recv(in, size, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
			MPI_Send(out, size, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
		}
		if (round >= 0) {
			times[round] = (MPI_Wtime() - start) / 2 * 1e6;
			sum += times[round];
		}
	}
	if (rank < 2)
		verify(in, size, 1 - rank, rank, rounds);
	if (rank == 0) {
		qsort(times, (size_t)rounds, sizeof(*times), by_value);
		printf("latency %d median %.2f us\n", size, times[rounds / 2]);
		printf("latency %d average %.2f us\n", size, sum / rounds);
		printf("latency %d p99 %.2f us\n", size, times[rounds - 1 - rounds / 100]);
		printf("latency %d longest %.2f us\n", size, times[rounds - 1]);
	}
	free(out);
	free(in);
	free(times);
}

static void bandwidth(int size, int rounds)
{
	size_t all = (size_t)size * WINDOW;
	unsigned char *data = allocate(all);
	MPI_Request requests[WINDOW];
	double start = 0;

	memset(data, 0, all);
	if (rank == 0) {
		for (int n = 0; n < WINDOW; n++)
			fill(data + (size_t)n * (size_t)size, size, 0, 1, n);
	}
	MPI_Barrier(MPI_COMM_WORLD);
	// The first two rounds set up what both sides keep.
	for (int round = -2; round < rounds && rank < 2; round++) {
		if (round == 0)
			start = MPI_Wtime();
		for (int n = 0; n < WINDOW; n++) {
			unsigned char *message = data + (size_t)n * (size_t)size;

			if (rank == 0)
				MPI_Isend(message, size, MPI_BYTE, 1, n, MPI_COMM_WORLD, &requests[n]);
			else
				MPI_Irecv(message, size, MPI_BYTE, 0, n, MPI_COMM_WORLD, &requests[n]);
		}
		MPI_Waitall(WINDOW, requests, MPI_STATUSES_IGNORE);
		// The sender's clock is to stop when the receiver has all.
		if (rank == 0)
			MPI_Recv(NULL, 0, MPI_BYTE, 1, WINDOW, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		else
			MPI_Send(NULL, 0, MPI_BYTE, 0, WINDOW, MPI_COMM_WORLD);
	}
	if (rank == 0) {
		double seconds = MPI_Wtime() - start, messages = (double)WINDOW * rounds;

		printf("bandwidth %d bandwidth %.2f MiB/s\n", size, messages * size / seconds / 1048576.0);
		printf("bandwidth %d rate %.6f M/s\n", size, messages / seconds / 1e6);
	} else if (rank == 1) {
		for (int n = 0; n < WINDOW; n++)
			verify(data + (size_t)n * (size_t)size, size, 0, 1, n);
	}
	free(data);
}

struct test {
	const char *name;
	void (*run)(int size, int rounds);
};

static const struct test tests[] = {
	{ "ring", ring },	{ "alltoall", all_to_all },   { "put", put },
	{ "latency", latency }, { "bandwidth", bandwidth },
};

static const struct test *find(const char *name)
{
	for (size_t n = 0; n < sizeof(tests) / sizeof(tests[0]); n++) {
		if (!strcmp(name, tests[n].name))
			return &tests[n];
	}
	return NULL;
}

static int usage(void)
{
	fprintf(stderr, "mpi-check ring|alltoall|put|latency|bandwidth SIZE ROUNDS...\n");
	return 2;
}

int main(int count, char **words)
{
	if (count < 4 || count % 3 != 1)
		return usage();
	for (int at = 1; at < count; at += 3) {
		if (!find(words[at]) || atoi(words[at + 1]) <= 0 || atoi(words[at + 2]) <= 0)
			return usage();
	}
	MPI_Init(NULL, NULL);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &processes);
	if (processes < 2) {
		fprintf(stderr, "at least two processes are needed\n");
		MPI_Abort(MPI_COMM_WORLD, 2);
	}
	for (int at = 1; at < count; at += 3) {
		find(words[at])->run(atoi(words[at + 1]), atoi(words[at + 2]));
		// Nobody has found anything wrong until all are here.
		MPI_Barrier(MPI_COMM_WORLD);
		if (rank == 0) {
			printf("verified %s %s\n", words[at], words[at + 1]);
			fflush(stdout);
		}
	}
	MPI_Finalize();
	return 0;
}
